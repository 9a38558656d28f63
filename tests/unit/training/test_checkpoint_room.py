"""A checkpoint waits for room on the disk."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.archive import rollout_state
from async_grpo.settings import ArchiveLimit
from async_grpo.training.checkpoints import UsedGroups

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


@pytest.mark.parametrize(("resumed", "removed"), [(False, []), (True, [0, 1, 3])])
def test_a_resumed_run_makes_room_before_its_first_checkpoint(
    tmp_path: Path, resumed: bool, removed: list[int]
) -> None:
    state = rollout_state.RolloutState(
        run_id="r", step=1, next_seq=5, rounds=1, unusable=[], consumed_below=2, consumed=[3]
    )
    asked: list[Container[int]] = []
    queue = SimpleNamespace(trim_done=lambda keep, consumed: asked.append(consumed) or keep)
    archive = UsedGroups(
        queue,  # type: ignore[arg-type]  # the fake has only what is used
        tmp_path,
        ArchiveLimit(1000),
        state if resumed else None,
    )
    archive.make_room()
    [consumed] = asked
    assert [seq for seq in range(5) if seq in consumed] == removed
