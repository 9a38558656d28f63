"""How much a worker that generates batch by batch claims at a time."""

from __future__ import annotations

import pytest

from async_grpo.rollout.batch_worker import once_issued


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        ([0], 0),  # nothing to wait for
        ([16], 16),
        ([20], 20),
        ([3, 9, 16], 16),  # a round is being issued
        ([3, 9, 14, 14], 14),  # a part of one
        ([3, 3], 3),
        ([3, 1], 1),  # another worker was there
    ],
)
def test_a_round_that_is_being_issued_is_waited_for(looks: list[int], found: int) -> None:
    left = iter(looks)
    assert once_issued(lambda: next(left), enough=16) == found
    assert list(left) == [], "looked as often as there was reason to"
