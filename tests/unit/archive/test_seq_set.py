"""The set of consumed sequence numbers: right in any order, and small however many there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from async_grpo.archive.rollout_state import SeqSet

some = st.lists(st.integers(0, 40), unique=True)


@given(some, some)
def test_it_is_a_set(first: list[int], second: list[int]) -> None:
    seqs = SeqSet(first)
    both = seqs.union(second)
    assert list(seqs) == sorted(first), "and a union leaves it as it was"
    assert list(both) == sorted({*first, *second})
    assert (len(both), both.above(20)) == (
        len({*first, *second}),
        sorted(seq for seq in {*first, *second} if seq >= 20),
    )
    assert [seq for seq in range(-1, 45) if seq in both] == list(both)


@given(some, some)
def test_the_first_that_is_missing(members: list[int], ignoring: list[int]) -> None:
    first = SeqSet(members).first_missing(ignoring)
    assert first not in members and first not in ignoring
    assert all(seq in members or seq in ignoring for seq in range(first))


def test_a_long_run_takes_no_more_memory_than_a_short_one() -> None:
    seqs = SeqSet()
    for start in range(0, 100_000, 8):
        seqs.update([start + place for place in (3, 1, 0, 2, 7, 5, 4, 6) if start + place != 50_001])
    assert len(seqs) == 99_999
    assert seqs._missing == {50_001}
