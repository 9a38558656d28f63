"""A checkpoint waits for room on the disk."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from async_grpo.archive import rollout_state

Usage = namedtuple("Usage", "total used free")


def test_waits_until_there_is_room_and_makes_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10, 10, 200])
    asked: list[str] = []
    monkeypatch.setattr(rollout_state, "ROOM_RETRY_S", 0.0)
    monkeypatch.setattr(rollout_state.shutil, "disk_usage", lambda folder: Usage(1000, 0, next(free)))
    rollout_state.wait_for_room(tmp_path, 100, make_room=lambda: asked.append("room"), should_stop=lambda: False)
    assert asked == ["room"]
    assert next(free, None) is None


def test_a_run_that_is_to_stop_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_state.shutil, "disk_usage", lambda folder: Usage(1000, 1000, 0))
    rollout_state.wait_for_room(tmp_path, 100, make_room=lambda: pytest.fail("nobody waits"), should_stop=lambda: True)
