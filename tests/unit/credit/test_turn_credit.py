"""The advantages of turns, against tables made by hand."""

from __future__ import annotations

from itertools import product
from math import nan, sqrt
from typing import Any

import numpy as np
import pytest

from async_grpo.credit.formulas import CREDITS, Credit, RewardedTurns, of_each_turn, per_token, turn_starts
from async_grpo.errors import RunRefused

# Two completions: the spread of (x, y) is |x - y| / sqrt(2), so that A = ±HALF where they differ by 1.
HALF = 0.5 / (sqrt(0.5) + 1e-4)


def by(difference: float) -> float:
    """A of the better of two completions whose rewards differ so much."""
    return (difference / 2) / (difference * sqrt(0.5) + 1e-4)


def one(outcome: float, rewards: list[float], has_result: bool | None = None) -> RewardedTurns:
    known = [reward for reward in rewards if reward == reward]
    result = len(rewards) > 1 if has_result is None else has_result
    return RewardedTurns(outcome=outcome, total=sum(known) if known else nan, rewards=rewards, has_result=result)


ONE_TURN = [one(1, [nan]), one(0, [nan])]
TWO_TURNS = [one(1, [0, nan]), one(0, [1, nan])]  # the tool helped the one that failed
THREE_TURNS = [one(1, [0, 1, nan]), one(0, [1, 0, nan])]
UNEQUAL = [one(1, [0.5, nan]), one(0, [0.0])]  # the second called no tool

TABLE: list[tuple[str, dict[str, Any], list[RewardedTurns], list[list[float]]]] = [
    ("outcome", {}, ONE_TURN, [[HALF], [-HALF]]),
    ("outcome", {}, TWO_TURNS, [[HALF, HALF], [-HALF, -HALF]]),
    ("merged", {}, TWO_TURNS, [[0, 0], [0, 0]]),
    ("merged", {}, UNEQUAL, [[by(1.5)] * 2, [-by(1.5)]]),
    ("turn", {}, ONE_TURN, [[HALF], [-HALF]]),
    ("turn", {}, TWO_TURNS, [[0, HALF], [0, -HALF]]),
    ("turn", {"coefficient": 0.5}, TWO_TURNS, [[HALF / 2, HALF], [-HALF / 2, -HALF]]),
    ("turn", {}, THREE_TURNS, [[HALF, HALF, HALF], [-HALF, -HALF, -HALF]]),
    ("turn", {}, UNEQUAL, [[HALF + by(0.5), HALF], [-HALF]]),
    ("turn", {"original": True}, UNEQUAL, [[HALF + by(0.5), HALF], [-by(1.5)]]),
    ("cae", {}, ONE_TURN, [[HALF], [-HALF]]),
    ("cae", {}, TWO_TURNS, [[0, HALF], [0, -HALF]]),
    ("cae", {"discount": 0.5}, TWO_TURNS, [[-by(0.5), HALF], [by(0.5), -HALF]]),
    ("cae", {}, THREE_TURNS, [[HALF, HALF, HALF], [-HALF, -HALF, -HALF]]),
    ("cae", {}, UNEQUAL, [[by(1.5), HALF], [-by(1.5)]]),
    ("recursive", {}, ONE_TURN, [[HALF], [-HALF]]),
    ("recursive", {}, TWO_TURNS, [[0, HALF], [0, -HALF]]),
    ("recursive", {"discount": 0.5}, TWO_TURNS, [[-HALF + HALF / 2, HALF], [HALF - HALF / 2, -HALF]]),
    ("recursive", {}, THREE_TURNS, [[HALF, 2 * HALF, HALF], [-HALF, -2 * HALF, -HALF]]),
    (
        "recursive",
        {"discount": 0.5},
        THREE_TURNS,  # A3 = ±1, A2 = ±(1 + 1/2), A1 = ∓1 ± (1 + 1/2) / 2, all times HALF
        [[-HALF / 4, 1.5 * HALF, HALF], [HALF / 4, -1.5 * HALF, -HALF]],
    ),
    ("recursive", {}, [one(0, [nan, 1]), one(0, [nan, 0])], [[HALF, HALF], [-HALF, -HALF]]),
    ("reward_to_go", {}, ONE_TURN, [[HALF], [-HALF]]),
]


@pytest.mark.parametrize(("kind", "options", "group", "right"), TABLE)
def test_advantages_are_those_of_the_table(
    kind: str, options: dict[str, Any], group: list[RewardedTurns], right: list[list[float]]
) -> None:
    found = Credit(kind=kind, **options).advantages(group)
    assert [row.tolist() for row in found] == [pytest.approx(row, abs=1e-9) for row in right]


def test_reward_to_go_compares_all_turns_of_the_group() -> None:
    rows = Credit(kind="reward_to_go", discount=0.5).advantages(THREE_TURNS)
    # Turn by turn, from the last: 1, 1 + 1/2, 0 + 3/4 and 0, 0, 1.
    values = np.array([0.75, 1.5, 1.0, 1.0, 0.0, 0.0])
    right = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    assert np.concatenate(rows) == pytest.approx(right)


def test_unscaled_advantages_are_differences() -> None:
    found = Credit(kind="turn", scaled=False).advantages(UNEQUAL)
    assert [row.tolist() for row in found] == [[0.75, 0.5], [-0.5]]


@pytest.mark.parametrize("kind", CREDITS)
def test_what_has_no_reward_has_no_advantage(kind: str) -> None:
    group = [one(nan, [nan, nan]), one(1, [nan, nan]), one(0, [nan, nan])]
    found = Credit(kind=kind).advantages(group)
    assert found[0].tolist() == [0, 0]
    assert found[1].tolist() == pytest.approx((-found[2]).tolist())
    assert (found[1] > 0.5).all()
    assert [row.tolist() for row in Credit(kind=kind).advantages([one(nan, [nan])] * 2)] == [[0], [0]]
    assert [row.tolist() for row in Credit(kind=kind).advantages([one(1, [])] * 2)] == [[], []]


def test_a_turn_without_a_reward_takes_no_part_in_the_comparison() -> None:
    group = [one(0, [1, nan]), one(0, [nan, nan]), one(0, [0, nan])]
    assert [row[0] for row in Credit(kind="recursive").advantages(group)] == pytest.approx([HALF, 0, -HALF])


def test_recursive_refuses_different_numbers_of_turns_and_says_what_to_take() -> None:
    with pytest.raises(RunRefused, match=r"completions of 1 and 2 turns.*reward_to_go"):
        Credit(kind="recursive").advantages(UNEQUAL)


def test_why_recursive_refuses_them() -> None:
    """A policy goes on with probability 1/2, and each second turn earns 1: to go on is better.

    Compared by the index of the turn, all second turns are equal, so that going on has no advantage, in any group of
    four. Reward to go has it.
    """
    gains: dict[str, float] = {"by index": 0.0, "reward to go": 0.0}
    for goes_on in product([False, True], repeat=4):
        group = [one(0, [nan, 1, 0]) if more else one(0, [0]) for more in goes_on]
        for name, rows in (
            ("by index", Credit(kind="recursive").compared_by_index(group)),
            ("reward to go", Credit(kind="reward_to_go").advantages(group)),
        ):
            gains[name] += sum(row[0] * (1 if more else -1) for row, more in zip(rows, goes_on, strict=True))
    assert gains["by index"] == pytest.approx(0, abs=1e-9)
    assert gains["reward to go"] > 1


@pytest.mark.parametrize(
    ("mask", "starts", "values", "right"),
    [
        ([1, 1], [0], [2.0], [2, 2]),
        ([1, 0, 0, 1], [0, 3], [2.0, 3.0], [2, 0, 0, 3]),
        ([1, 0, 1, 1, 0], [0, 2], [2.0, 3.0], [2, 0, 3, 3, 0]),
        ([1, 0, 1, 0, 1], [0, 2, 4], [1.0, 2.0, 3.0], [1, 0, 2, 0, 3]),
        ([0, 1], [1], [5.0], [0, 5]),
        ([], [], [], []),
    ],
)
def test_turns_are_the_runs_of_1(mask: list[int], starts: list[int], values: list[float], right: list[float]) -> None:
    assert turn_starts(mask) == starts
    assert per_token(mask, values).tolist() == right


def test_values_and_turns_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="2 values for the 1 turns"):
        per_token([1, 1], [1.0, 2.0])


def test_what_a_function_gives_is_one_reward_a_turn() -> None:
    assert of_each_turn(0.5, 1, "f") == [0.5]
    assert str(of_each_turn(0.5, 3, "f")) == "[0.5, nan, nan]"
    assert str(of_each_turn([None, 1], 2, "f")) == "[nan, 1.0]"
    assert str(of_each_turn(None, 2, "f")) == "[nan, nan]"
    assert of_each_turn(0.5, 0, "f") == []
    with pytest.raises(ValueError, match="'f' gave 3 rewards for a completion of 2 turns"):
        of_each_turn([1, 2, 3], 2, "f")
