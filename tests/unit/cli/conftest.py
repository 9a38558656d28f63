"""Commands are called in this process; the GPUs that they see are a test's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from async_grpo.setup import devices
from kit.commands import printed, refused

__all__ = ["printed", "refused"]


@pytest.fixture
def see_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From this call on, so many GPUs are visible."""
    return lambda count: monkeypatch.setattr(devices, "visible_gpus", lambda: count)
