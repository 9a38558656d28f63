"""Groups scored beside generation, or at once where that is quicker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.rollout import scoring
from async_grpo.rollout.scoring import QUICK_IN_A_ROW, QUICK_S, Scored, Scoring

DEADLINE_S = 60.0
AT_MOST = 2


class Clock:
    """Time that passes only in reward functions."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


class Rewards:
    """Takes as long as the group says, by the clock, and remembers who called."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.in_callers_thread: list[bool] = []
        self.caller = threading.current_thread()

    def __call__(self, group: Any) -> Any:
        self.in_callers_thread.append(threading.current_thread() is self.caller)
        self.clock.now += group
        return f"scores of {group}"


def score_all(score: Scoring[int], groups: list[Any]) -> list[Scored[int]]:
    outcomes = []
    for key, group in enumerate(groups):
        score.start(key, group)
        outcomes += wait_for(score, 1)
    return outcomes


def wait_for(score: Scoring[int], wanted: int) -> list[Scored[int]]:
    outcomes: list[Scored[int]] = []
    while len(outcomes) < wanted:
        found = score.finished(DEADLINE_S)
        assert found, "nothing came back"
        outcomes += found
    return outcomes


def test_a_reward_that_has_proven_quick_needs_no_thread(clock: Clock) -> None:
    rewards = Rewards(clock)
    outcomes = score_all(Scoring(rewards, AT_MOST), [0.0] * (QUICK_IN_A_ROW + 3))
    assert rewards.in_callers_thread == [False] * QUICK_IN_A_ROW + [True] * 3
    assert [outcome.key for outcome in outcomes] == list(range(QUICK_IN_A_ROW + 3))
    assert {outcome.scores for outcome in outcomes} == {"scores of 0.0"}


def test_a_slow_reward_stays_in_threads(clock: Clock) -> None:
    rewards = Rewards(clock)
    score_all(Scoring(rewards, AT_MOST), [QUICK_S] * 3 * QUICK_IN_A_ROW)
    assert not any(rewards.in_callers_thread)


def test_a_reward_that_is_slow_now_and_then_stalls_the_caller_ever_more_seldom(clock: Clock) -> None:
    rewards = Rewards(clock)
    one_slow = [0.0] * QUICK_IN_A_ROW + [1.0]
    score_all(Scoring(rewards, AT_MOST), one_slow * 50)
    slow = rewards.in_callers_thread[QUICK_IN_A_ROW :: len(one_slow)]
    assert slow == [True] + [False] * 49


def test_what_a_quick_reward_raises_is_the_groups(clock: Clock) -> None:
    broken = object()

    def rewards(group: Any) -> Any:
        if group is broken:
            raise RuntimeError("no reward")
        return "scores"

    outcomes = score_all(Scoring(rewards, AT_MOST), [0] * QUICK_IN_A_ROW + [broken, 0])
    assert [outcome.scores for outcome in outcomes[QUICK_IN_A_ROW:]] == [None, "scores"]
    assert "no reward" in outcomes[QUICK_IN_A_ROW].error


def test_so_many_groups_are_scored_at_a_time_and_the_others_wait() -> None:
    running, most, lock = [0], [0], threading.Lock()
    go_on = threading.Event()

    def rewards(group: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        assert go_on.wait(DEADLINE_S)
        with lock:
            running[0] -= 1

    score: Scoring[int] = Scoring(rewards, AT_MOST)
    for key in range(5):
        score.start(key, key)  # type: ignore[arg-type]
    assert (score.backlog, score.busy) == (3, True)
    until(lambda: running[0] == AT_MOST)
    go_on.set()
    assert sorted(outcome.key for outcome in wait_for(score, 5)) == list(range(5))
    assert (most[0], score.backlog, score.busy) == (AT_MOST, 0, False)


def test_who_asks_is_told_when_an_outcome_can_be_had() -> None:
    told = threading.Event()
    score: Scoring[int] = Scoring(lambda group: None, AT_MOST)  # type: ignore[arg-type, return-value]
    score.on_done = told.set
    score.start(1, None)  # type: ignore[arg-type]
    assert told.wait(DEADLINE_S)
    assert [outcome.key for outcome in score.finished(0)] == [1]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
