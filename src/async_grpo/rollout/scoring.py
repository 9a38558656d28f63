"""Scores groups in threads of their own, so that a slow reward (a judge, a sandbox) does not stall the engine.

Reward functions share objects between their calls, and TRL calls them one at a time, with a batch. So does a worker,
unless they say by attributes what else they take: `thread_safe = True`, several calls at a time; `joint = False`, no
call with more than one prompt group. An override of TRL's scoring calls them, and is asked as well. The groups that
wait meanwhile are handed over in one call: what a call costs, however many completions it gets, is paid once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from trl.trainer.utils import is_async_callable

from async_grpo.log import logger
from async_grpo.rollout.failures import refusal_in
from async_grpo.rollout.threads import KeptThreads, UserCode, asks_for_main_thread
from async_grpo.rollout.trl_group import GroupOutcome
from async_grpo.settings import WorkerSettings
from async_grpo.setup.replaced import replaced_by_user
from async_grpo.telemetry.activity import SCORING, activity

if TYPE_CHECKING:
    from async_grpo.rollout.trl_group import GeneratedGroup, Scores
    from async_grpo.rollout.trl_trainer import RolloutTrainer


OVERLAPPING = 4  # calls at a time, where the reward functions allow several and no option says how many


@dataclass(frozen=True, slots=True)
class RewardCalls:
    """Calls of all reward functions of a trainer together."""

    at_a_time: int  # 0: in the caller's thread
    most_completions: int  # of a call with several groups; 0: a call is for one group
    in_main_thread: bool = False  # one of them is known to need it


def reward_calls(trainer: Any, settings: WorkerSettings, *, deterministic: bool) -> RewardCalls:
    """As the functions and the options say. Rewards in another order may draw other random numbers."""
    own_scoring = [trainer._calculate_rewards] if "_calculate_rewards" in replaced_by_user(trainer) else []
    functions = [*trainer.reward_funcs, *own_scoring]
    overlap = all(is_async_callable(function) or _says(function, "thread_safe", False) for function in functions)
    at_a_time = settings.score_concurrency or (OVERLAPPING if overlap else 1)
    joint = not settings.score_alone and all(_says(function, "joint", True) for function in functions)
    batch = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    in_main_thread = any(map(asks_for_main_thread, trainer.reward_funcs))
    return RewardCalls(0 if deterministic else at_a_time, batch if joint else 0, in_main_thread)


def _says(function: Any, name: str, default: bool) -> bool:
    while isinstance(function, partial) and name not in vars(function):
        function = function.func
    return bool(getattr(function, name, default))


class _ToScore(NamedTuple):
    group: GeneratedGroup
    alone: bool  # it is not to share a call

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for groups that one call may have: it gets one `trainer_state`, and one list for each column."""
        job = self.group.job
        return (job.purpose, job.trainer_state or self.group.version, sorted(self.group.rows[0]))


class Scoring:
    """As many calls at a time as `calls` says, each in a thread of its own; groups come back as they are done.

    A call takes groups of one kind, the oldest first, and no more than its share of those that wait. If it raises, it
    is repeated group by group, so that a group which makes it raise costs itself only. Asynchronous reward functions of
    all calls share TRL's one event loop.
    """

    def __init__(self, trl: RolloutTrainer, calls: RewardCalls) -> None:
        self._trl, self._calls = trl, calls
        self._rewards = UserCode("the reward functions", in_main=calls.in_main_thread)
        self._waiting: list[_ToScore] = []
        self._called = 0  # calls under way
        self._running = 0  # groups that are in one, or were and are not taken from `finished` yet
        self._threads = KeptThreads()
        self._done: SimpleQueue[GroupOutcome | None] = SimpleQueue()  # None: a call has ended

    @property
    def is_full(self) -> bool:
        """Whether so many groups wait that the next call could not have more."""
        waiting = sum(len(one.group.rows) for one in self._waiting)
        return waiting > 0 and waiting >= self._calls.most_completions

    @property
    def busy(self) -> bool:
        """Whether any group is waiting, being scored, or scored and not taken from `finished` yet."""
        return bool(self._waiting) or self._running > 0

    def start(self, group: GeneratedGroup, *, alone: bool = False) -> None:
        """Have `group` scored, `alone` in a call of its own; its outcome comes out of `finished`."""
        activity.has_jobs([group.job.seq], SCORING)
        self._waiting.append(_ToScore(group, alone))
        self._waiting.sort(key=lambda one: one.group.job.seq)
        self._fill()

    def finished(self, timeout_s: float) -> list[GroupOutcome]:
        """What is done by now; waits up to `timeout_s` for the first."""
        outcomes: list[GroupOutcome] = []
        try:
            while True:
                outcome = self._done.get(timeout=0 if outcomes else timeout_s)
                if outcome is None:
                    self._called -= 1
                    self._fill()
                else:
                    outcomes.append(outcome)
                    self._running -= 1
        except Empty:
            return outcomes

    def _fill(self) -> None:
        at_a_time = self._calls.at_a_time
        while self._waiting and (at_a_time == 0 or self._called < at_a_time):
            groups = self._next_call()
            self._called += 1
            self._running += len(groups)
            if at_a_time == 0:
                activity.doing(SCORING)
                self._run(groups)
            else:
                self._threads.run(partial(self._run, groups), name="scoring")

    def _next_call(self) -> list[GeneratedGroup]:
        first = self._waiting[0]
        mates = [first]
        if self._calls.most_completions and not first.alone:
            mates = [one for one in self._waiting if not one.alone and one.kind == first.kind]
            mates = mates[: math.ceil(len(mates) / max(1, self._calls.at_a_time))]
            ends = accumulate(len(one.group.rows) for one in mates)
            mates = mates[: max(1, sum(end <= self._calls.most_completions for end in ends))]
        self._waiting = [one for one in self._waiting if not any(one is mate for mate in mates)]
        return [one.group for one in mates]

    def _run(self, groups: Sequence[GeneratedGroup]) -> None:
        parts, spent_s = [groups], 0.0  # of each group's time, on a call of all of them
        while parts:
            part = parts.pop(0)
            started = time.monotonic()
            scores: Sequence[Scores | None] = [None] * len(part)
            error: BaseException | None = None
            try:
                scores = self._rewards.call(self._trl.score, part)
            except BaseException as raised:  # noqa: BLE001  # whatever rewards raise belongs to the job: `exit()` too
                error = raised
            seconds = spent_s + (time.monotonic() - started) / len(part)
            if error is not None and len(part) > 1 and refusal_in(error) is None:
                logger.info("the rewards of {} groups are computed group by group, as their call raised", len(part))
                parts, spent_s = [[group] for group in part], seconds
                continue
            for group, score in zip(part, scores, strict=True):
                if group.let_go is not None:
                    group.let_go()
                self._done.put(GroupOutcome(job=group.job, group=group, scores=score, error=error, seconds=seconds))
        self._done.put(None)
