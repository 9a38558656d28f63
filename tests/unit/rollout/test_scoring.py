"""Groups scored during generation: how often the reward functions are called, with which groups, in which threads."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from async_grpo.errors import RunRefused
from async_grpo.rollout.scoring import OVERLAPPING, RewardCalls, Scoring, reward_calls
from async_grpo.rollout.threads import main_thread
from async_grpo.rollout.trl_group import GroupOutcome
from async_grpo.settings import WorkerSettings
from kit.waiting import DEADLINE_S, until

GROUP_SIZE = 2
BATCH = 8  # completions


def group_of(seq: int, *, purpose: str = "train", step: int = 0, columns: Sequence[str] = ("prompt",)) -> Any:
    row = dict.fromkeys(columns, "")
    job = SimpleNamespace(seq=seq, purpose=purpose, trainer_state={"global_step": step})
    return SimpleNamespace(job=job, rows=[row] * GROUP_SIZE, version=0, let_go=None)


class Rewards:
    """Reward functions that wait until the test lets them go, and note what they were called with."""

    def __init__(self, score: Callable[[int], Any] = lambda seq: f"of {seq}", *, held: bool = False) -> None:
        self._score = score
        self.calls: list[list[int]] = []
        self.at_once = self.most_at_once = 0
        self._go_on = threading.Event()
        self._lock = threading.Lock()
        if not held:
            self.go_on()

    def go_on(self) -> None:
        self._go_on.set()

    def score(self, groups: Sequence[Any]) -> list[Any]:
        with self._lock:
            self.calls.append([group.job.seq for group in groups])
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            assert self._go_on.wait(DEADLINE_S)
            return [self._score(group.job.seq) for group in groups]
        finally:
            with self._lock:
                self.at_once -= 1


def wait_for(score: Scoring, wanted: int) -> dict[int, GroupOutcome]:
    outcomes: list[GroupOutcome] = []
    while len(outcomes) < wanted:
        found = score.finished(DEADLINE_S)
        assert found, "nothing came back"
        outcomes += found
    assert len(outcomes) == wanted
    return {outcome.job.seq: outcome for outcome in outcomes}


def scoring(rewards: Rewards, at_a_time: int = 1, most: int = BATCH) -> Scoring:
    return Scoring(rewards, RewardCalls(at_a_time, most))


def started(rewards: Rewards, groups: Sequence[Any], **calls: int) -> Scoring:
    """Start these groups, or groups of these numbers."""
    score = scoring(rewards, **calls)
    for group in groups:
        score.start(group_of(group) if isinstance(group, int) else group)
    return score


def scored(rewards: Rewards, groups: Sequence[Any], **calls: int) -> dict[int, GroupOutcome]:
    """Start groups while the rewards wait, and let those go on."""
    score = started(rewards, groups, **calls)
    rewards.go_on()
    outcomes = wait_for(score, len(groups))
    assert not score.busy
    return outcomes


def test_groups_that_wait_for_a_call_share_the_next_one() -> None:
    rewards = Rewards(held=True)
    outcomes = scored(rewards, [0, 3, 1, 2, 4, 5])
    assert rewards.calls == [[0], [1, 2, 3, 4], [5]], "the oldest first, and no more than TRL's batch"
    assert rewards.most_at_once == 1
    assert {seq: outcome.scores for seq, outcome in outcomes.items()} == {seq: f"of {seq}" for seq in range(6)}


def test_a_call_has_groups_of_one_purpose_step_and_columns() -> None:
    rewards = Rewards(held=True)
    solved = group_of(4, columns=("prompt", "solved"))
    scored(rewards, [0, 1, group_of(2, step=1), group_of(3, purpose="eval"), solved, 5, group_of(6, step=1)])
    assert rewards.calls == [[0], [1, 5], [2, 6], [3], [4]]


def test_a_group_that_failed_before_has_a_call_of_its_own() -> None:
    rewards = Rewards(held=True)
    score = started(rewards, [9])
    score.start(group_of(0), alone=True)
    for seq in (1, 2):
        score.start(group_of(seq))
    rewards.go_on()
    wait_for(score, 4)
    assert rewards.calls == [[9], [0], [1, 2]]


def test_a_call_that_raises_is_repeated_group_by_group() -> None:
    def broken(seq: int) -> str:
        if seq == 2:
            raise RuntimeError("no reward")
        return "scores"

    rewards = Rewards(broken, held=True)
    released: list[int] = []
    groups = [group_of(seq) for seq in range(4)]
    for group in groups:
        group.let_go = functools.partial(released.append, group.job.seq)
    outcomes = scored(rewards, groups)
    assert rewards.calls == [[0], [1, 2, 3], [1], [2], [3]]
    assert [outcomes[seq].scores for seq in range(4)] == ["scores", "scores", None, "scores"]
    assert "no reward" in str(outcomes[2].error)
    assert sorted(released) == [0, 1, 2, 3], "each once, and not before it was scored"


def test_what_ends_the_run_is_not_asked_for_again() -> None:
    rewards = Rewards(Mock(side_effect=RunRefused("no optimizer")), held=True)
    assert all(isinstance(outcome.error, RunRefused) for outcome in scored(rewards, range(3)).values())
    assert rewards.calls == [[0], [1, 2]]


def test_a_call_of_several_groups_is_shared_out_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr("async_grpo.rollout.scoring.time", SimpleNamespace(monotonic=lambda: next(clock)))
    outcomes = scored(Rewards(held=True), range(4))
    assert [outcomes[seq].seconds for seq in (1, 2, 3)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("at_a_time", [0, 2], ids=["in the caller's thread", "beside"])
def test_a_reward_that_exits_costs_its_own_group(at_a_time: int) -> None:
    rewards = Rewards(lambda seq: sys.exit("no licence") if seq == 1 else "scores")
    outcomes = scored(rewards, range(3), at_a_time=at_a_time)
    assert [outcomes[seq].scores for seq in range(3)] == ["scores", None, "scores"]
    assert "no licence" in str(outcomes[1].error)


def test_calls_that_may_overlap_do_and_share_what_waits() -> None:
    rewards = Rewards(held=True)
    score = started(rewards, range(8), at_a_time=2)
    until(lambda: rewards.at_once == 2)
    rewards.go_on()
    wait_for(score, 8)
    first, second, *later = rewards.calls
    assert sorted([first, second]) == [[0], [1]]
    assert [2, 3, 4] in later, "half of the six that wait"


def test_a_reward_that_hangs_holds_up_its_own_call() -> None:
    go_on = threading.Event()
    rewards = Rewards(lambda seq: seq or go_on.wait(DEADLINE_S))
    score = started(rewards, range(5), at_a_time=2, most=0)
    assert sorted(wait_for(score, 4)) == [1, 2, 3, 4]
    go_on.set()
    assert [*wait_for(score, 1)] == [0]
    assert all(len(call) == 1 for call in rewards.calls)


@pytest.mark.parametrize(("most", "enough"), [(BATCH, 4), (0, 1)], ids=["joint", "each group alone"])
def test_no_more_wait_than_the_next_call_can_have(most: int, enough: int) -> None:
    rewards = Rewards(held=True)
    score = started(rewards, [0], most=most)
    full = []
    for seq in range(1, 6):
        score.start(group_of(seq))
        full.append(score.is_full)
    assert full == [seq >= enough for seq in range(1, 6)]
    rewards.go_on()
    wait_for(score, 6)
    assert not score.is_full


def test_without_threads_of_its_own_in_the_callers_and_in_order() -> None:
    rewards = Rewards()
    threads: list[threading.Thread] = []
    rewards._score = lambda seq: threads.append(threading.current_thread())
    score = started(rewards, [2, 1], at_a_time=0)
    assert threads == [threading.current_thread()] * 2
    assert [outcome.group.job.seq for outcome in score.finished(0)] == [2, 1]
    assert rewards.calls == [[2], [1]]


def test_rewards_that_use_signals_are_called_in_the_main_thread() -> None:
    score = scoring(Rewards(lambda seq: signal.signal(signal.SIGUSR2, signal.SIG_DFL)))
    found: dict[int, GroupOutcome] = {}
    main_thread.serve_while(lambda: score.start(group_of(0)) or found.update(wait_for(score, 1)))  # type: ignore[func-returns-value]
    assert found[0].error is None


# --- what functions and options say


def plain(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


async def waits(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


class Judge:
    """A reward with objects of its own."""

    def __init__(self, **says: bool) -> None:
        vars(self).update(says)
        self.__name__ = "judge"

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)


SAFE, ALONE = Judge(thread_safe=True), Judge(joint=False)


@pytest.mark.parametrize(
    ("functions", "at_a_time", "most"),
    [
        ([plain], 1, BATCH),
        ([torch.nn.Linear(1, 1)], 1, BATCH),
        ([waits], OVERLAPPING, BATCH),
        ([waits, plain], 1, BATCH),
        ([waits, SAFE], OVERLAPPING, BATCH),
        ([functools.partial(SAFE, weight=2)], OVERLAPPING, BATCH),
        ([Judge(thread_safe=False), waits], 1, BATCH),
        ([plain, ALONE], 1, 0),
    ],
)
def test_what_the_functions_say(functions: list[Any], at_a_time: int, most: int) -> None:
    assert reward_calls(trainer(functions), WorkerSettings(), deterministic=False) == RewardCalls(at_a_time, most)


def test_an_override_of_the_scoring_is_asked_as_well() -> None:
    """It may keep something between its calls, however safe the functions are that it calls."""

    def scores(self: Any, *args: Any) -> Any:
        raise AssertionError

    def calls(**says: bool) -> RewardCalls:
        own = type("Own", (), {"_calculate_rewards": scores})()
        vars(own).update(vars(trainer([waits])))
        vars(scores).update(says)
        return reward_calls(own, WorkerSettings(), deterministic=False)

    assert calls() == RewardCalls(1, BATCH)
    assert calls(thread_safe=True, joint=False) == RewardCalls(OVERLAPPING, 0)


@pytest.mark.parametrize("module", ["unsloth_compiled_cache.UnslothGRPOTrainer", "UnslothGRPOTrainer"])
def test_the_scoring_of_a_package_that_does_what_trl_does_is_no_override(module: str) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec("class Own:\n    def _calculate_rewards(self, *args):\n        raise AssertionError", names)
    own = names["Own"]()
    vars(own).update(vars(trainer([waits])))
    assert reward_calls(own, WorkerSettings(), deterministic=False) == RewardCalls(OVERLAPPING, BATCH)


def test_what_the_options_say() -> None:
    many, alone = WorkerSettings(score_concurrency=7), WorkerSettings(score_alone=True)
    assert reward_calls(trainer([plain]), many, deterministic=False) == RewardCalls(7, BATCH)
    assert reward_calls(trainer([plain]), alone, deterministic=False) == RewardCalls(1, 0)
    assert reward_calls(trainer([waits]), many, deterministic=True).at_a_time == 0


def trainer(functions: list[Any]) -> Any:
    args = SimpleNamespace(per_device_train_batch_size=4, steps_per_generation=BATCH // 4)
    return SimpleNamespace(reward_funcs=functions, args=args)
