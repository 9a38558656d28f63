"""The launcher's surroundings, for the tests of this folder; `stage.py` is next to it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import Stage

from async_grpo.launch import supervisor
from kit.waiting import is_gone


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Stage]:
    """At the end no child may be left behind."""
    stage = Stage(tmp_path, capsys)
    monkeypatch.setattr(sys, "executable", str(stage.python))
    monkeypatch.setattr(supervisor, "POLL_S", 0.01)
    yield stage
    left_behind = [pid for pid in stage.pids() if not is_gone(pid)]
    for pid in left_behind:
        os.kill(pid, signal.SIGKILL)
    assert left_behind == []


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts follow in a moment. A real pause is a second or more."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.005)
