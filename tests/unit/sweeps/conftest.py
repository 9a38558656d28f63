"""A folder for sweeps of fake runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_yard import SweepYard, play

from async_grpo.launch import supervisor
from kit.commands import printed, refused

__all__ = ["printed", "refused"]


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepYard:
    monkeypatch.setattr(supervisor, "POLL_S", 0.005)
    play(monkeypatch, tmp_path)
    return SweepYard(tmp_path)
