"""Which groups a checkpoint was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.archive.rollout_state import FILE_NAME, RolloutState, pack_consumed, read, write
from async_grpo.errors import BadFileError


def state(step: int = 3, run_id: str = "mine", **changes: object) -> RolloutState:
    fields = {"next_seq": 9, "rounds": 3, "unusable": [2], "consumed_below": 4, "consumed": [6], **changes}
    return RolloutState(run_id=run_id, step=step, **fields)  # type: ignore[arg-type]


def test_a_round_of_any_size_is_read_back(tmp_path: Path) -> None:
    """512 prompts a batch: more than the queue has open at once."""
    write(tmp_path, state(next_seq=600, rounds=1, unusable=[], consumed_below=512, consumed=[]))
    assert read(tmp_path / FILE_NAME) == state(next_seq=600, rounds=1, unusable=[], consumed_below=512, consumed=[])
    write(tmp_path, state(next_seq=600, rounds=0, unusable=[], consumed_below=512, consumed=[]))
    with pytest.raises(BadFileError, match="0 rounds cannot have consumed 512 groups"):
        read(tmp_path / FILE_NAME)


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
    assert set(saved.consumed_seqs()) == consumed and saved.consumed_groups == len(consumed)
    assert {seq for seq in range(70) if saved.has_consumed(seq)} == consumed
    assert {seq for seq in range(70) if seq in saved} == consumed | unusable
