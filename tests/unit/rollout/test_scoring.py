"""Groups scored during generation."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from async_grpo.rollout.scoring import Scored, Scoring
from patience import until

DEADLINE_S = 60.0
AT_MOST = 2


def wait_for(score: Scoring, wanted: int) -> list[Scored]:
    outcomes: list[Scored] = []
    while len(outcomes) < wanted:
        found = score.finished(DEADLINE_S)
        assert found, "nothing came back"
        outcomes += found
    return outcomes


def test_what_a_reward_raises_is_the_groups() -> None:
    def rewards(group: Any) -> Any:
        if group == 1:
            raise RuntimeError("no reward")
        return "scores"

    score: Scoring = Scoring(rewards, AT_MOST)
    for key in range(3):
        score.start(key)  # type: ignore[arg-type]
    outcomes = {outcome.group: outcome for outcome in wait_for(score, 3)}
    assert [outcomes[key].scores for key in range(3)] == ["scores", None, "scores"]
    assert "no reward" in str(outcomes[1].error)


@pytest.mark.parametrize("at_most", [0, AT_MOST], ids=["in the caller's thread", "beside"])
def test_a_reward_that_exits_costs_its_own_group(at_most: int) -> None:
    score: Scoring = Scoring(lambda group: sys.exit("no licence") if group == 1 else "scores", at_most)  # type: ignore[arg-type, return-value]
    for key in range(3):
        score.start(key)  # type: ignore[arg-type]
    outcomes = {outcome.group: outcome for outcome in wait_for(score, 3)}
    assert [outcomes[key].scores for key in range(3)] == ["scores", None, "scores"]
    assert "no licence" in str(outcomes[1].error)


def test_a_reward_that_hangs_holds_up_its_own_group() -> None:
    go_on = threading.Event()
    score: Scoring = Scoring(lambda group: group or go_on.wait(DEADLINE_S), AT_MOST)  # type: ignore[arg-type, return-value]
    for key in range(5):
        score.start(key)  # type: ignore[arg-type]
    assert sorted(outcome.group for outcome in wait_for(score, 4)) == [1, 2, 3, 4]
    go_on.set()
    assert [outcome.group for outcome in wait_for(score, 1)] == [0]


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

    score: Scoring = Scoring(rewards, AT_MOST)
    for key in range(5):
        score.start(key)  # type: ignore[arg-type]
    assert (score.backlog, score.busy) == (3, True)
    until(lambda: running[0] == AT_MOST)
    go_on.set()
    assert sorted(outcome.group for outcome in wait_for(score, 5)) == list(range(5))
    assert (most[0], score.backlog, score.busy) == (AT_MOST, 0, False)


def test_in_the_callers_thread_groups_are_scored_in_order() -> None:
    threads: list[threading.Thread] = []
    score = Scoring(lambda group: threads.append(threading.current_thread()), 0)  # type: ignore[arg-type, return-value]
    for key in (2, 1):
        score.start(key)  # type: ignore[arg-type]
    assert score.busy
    assert [outcome.group for outcome in score.finished(0)] == [2, 1]
    assert threads == [threading.current_thread()] * 2
    assert not score.busy
