"""Scores groups in threads of their own, so that a slow reward (a judge, a sandbox) does not stall the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from async_grpo.rollout.threads import KeptThreads

if TYPE_CHECKING:
    from async_grpo.rollout.trl_group import GeneratedGroup, Scores


@dataclass(frozen=True, slots=True)
class Scored:
    """One group's outcome: scores, or what a reward function raised."""

    group: GeneratedGroup
    scores: Scores | None
    error: BaseException | None
    seconds: float


class Scoring:
    """Up to `at_most` groups at a time, each in a thread of its own; they come back as they are done.

    Asynchronous reward functions of all groups share TRL's one event loop.

    Args:
        at_most: 0 scores each group in the caller's thread, in order.
    """

    def __init__(self, score: Callable[[GeneratedGroup], Scores], at_most: int) -> None:
        self._score = score
        self._at_most = at_most
        self._waiting: deque[GeneratedGroup] = deque()
        self._running = 0
        self._threads = KeptThreads()
        self._done: SimpleQueue[Scored] = SimpleQueue()

    @property
    def backlog(self) -> int:
        """Groups that wait for a thread."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether any group is waiting, being scored, or scored and not taken from `finished` yet."""
        return bool(self._waiting) or self._running > 0

    def start(self, group: GeneratedGroup) -> None:
        """Have `group` scored; its outcome comes out of `finished`."""
        if self._at_most == 0:
            self._running += 1
            self._run(group)
            return
        self._waiting.append(group)
        self._fill()

    def finished(self, timeout_s: float) -> list[Scored]:
        """What is done by now; waits up to `timeout_s` for the first."""
        outcomes: list[Scored] = []
        try:
            while True:
                outcomes.append(self._done.get(timeout=0 if outcomes else timeout_s))
                self._running -= 1
        except Empty:
            self._fill()
            return outcomes

    def _fill(self) -> None:
        while self._waiting and self._running < self._at_most:
            self._running += 1
            self._threads.run(partial(self._run, self._waiting.popleft()), name="scoring")

    def _run(self, group: GeneratedGroup) -> None:
        started = time.monotonic()
        scores: Scores | None = None
        error: BaseException | None = None
        try:
            scores = self._score(group)
        except BaseException as raised:  # noqa: BLE001  # whatever rewards raise belongs to the job: `exit()` as well
            error = raised
        self._done.put(Scored(group, scores, error, time.monotonic() - started))
