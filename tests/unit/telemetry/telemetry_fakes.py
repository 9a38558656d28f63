"""What several tests of this folder share."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from async_grpo.telemetry.activity import LOADING, Activity


def worker(root: Path, name: str = "dev1", state: str = LOADING) -> Activity:
    """A process of the run in `root` that writes what it does."""
    writer = Activity()
    writer.publish(root, name, device="cpu", run_id="run", state=state)
    return writer


def set_clock(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> SimpleNamespace:
    """A clock for these modules, which `now` is set of."""
    clock = SimpleNamespace(now=1000.0)
    time = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None)
    for module in modules:
        monkeypatch.setattr(module, "time", time)
    return clock
