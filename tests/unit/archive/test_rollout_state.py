"""Which groups a checkpoint was trained on, and which checkpoint a run resumes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.archive import rollout_state
from async_grpo.archive.rollout_state import FILE_NAME, RolloutState, pack_consumed
from async_grpo.errors import RunDirError


def state(step: int = 3, run_id: str = "mine", **changes: object) -> RolloutState:
    fields = {"next_seq": 9, "rounds": 3, "unusable": [2], "consumed_below": 4, "consumed": [6], **changes}
    return RolloutState(run_id=run_id, step=step, **fields)  # type: ignore[arg-type]


def save(output_dir: Path, saved: RolloutState) -> Path:
    checkpoint = output_dir / f"checkpoint-{saved.step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    rollout_state.save(checkpoint, saved)
    return checkpoint


def test_packing_keeps_the_set_small() -> None:
    assert pack_consumed(0, {0, 1, 2, 5}) == (3, {5})
    assert pack_consumed(2, {3, 5}, unusable=[0, 2]) == (4, {5})
    assert pack_consumed(0, set()) == (0, set())
    assert pack_consumed(0, {4}) == (0, {4})
    assert pack_consumed(0, {0}, unusable=[1, 3]) == (2, set())


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), st.integers(0, 60))
def test_packing_loses_nothing(consumed: set[int], others: set[int], earlier: int) -> None:
    """Neither at once nor in two parts."""
    unusable = others - consumed
    packed = pack_consumed(0, {seq for seq in consumed if seq < earlier}, unusable)
    below, above = pack_consumed(packed[0], packed[1] | consumed, unusable)
    saved = state(consumed_below=below, consumed=sorted(above), unusable=sorted(unusable))
    assert set(saved.consumed_seqs()) == consumed
    assert {seq for seq in range(70) if saved.has_consumed(seq)} == consumed
    assert {seq for seq in range(70) if seq in saved} == consumed | unusable


def test_the_newest_complete_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    for step in (9, 10, 2):  # 10 is newer than 9, whatever the alphabet and the file times say
        save(tmp_path, state(step))
    assert rollout_state.latest(tmp_path, "mine") == (tmp_path / "checkpoint-10", state(10))


def test_a_checkpoint_without_its_last_file_is_incomplete_and_not_used(tmp_path: Path) -> None:
    save(tmp_path, state(1))
    torn = save(tmp_path, state(2))
    (torn / FILE_NAME).unlink()
    found = rollout_state.latest(tmp_path, "mine")
    assert found is not None and found[0].name == "checkpoint-1"


def test_nothing_but_whole_files_is_left_behind(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, state())
    assert sorted(path.name for path in checkpoint.iterdir()) == ["model.safetensors", FILE_NAME]


def test_checkpoints_of_another_run_are_not_ours(tmp_path: Path) -> None:
    save(tmp_path, state(1))
    save(tmp_path, state(5, run_id="another"))
    found = rollout_state.latest(tmp_path, "mine")
    assert found is not None and found[1].step == 1
    assert rollout_state.latest(tmp_path, "a third") is None


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert rollout_state.latest(tmp_path, "mine") is None
    assert rollout_state.latest(tmp_path / "missing", "mine") is None


def test_checkpoints_of_another_format_are_left_alone(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, state())
    data = json.loads((checkpoint / FILE_NAME).read_text())
    (checkpoint / FILE_NAME).write_text(json.dumps({**data, "format": 99}))
    assert rollout_state.latest(tmp_path, "mine") is None


@pytest.mark.parametrize("content", ['{"run_id": "mi', '{"format": 1, "run_id": "mine"}', "[]", "{}", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(tmp_path: Path, content: str | bytes) -> None:
    save(tmp_path, state(1))
    broken = save(tmp_path, state(2))
    (broken / FILE_NAME).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(
        RunDirError, match=r"checkpoint-2/rollout_state\.json cannot be used: .*Move .*checkpoint-2 away"
    ):
        rollout_state.latest(tmp_path, "mine")
