"""Scores groups beside generation, so that a slow reward (a judge, a sandbox, an API) does not stall the engine."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from async_grpo.rollout.threads import KeptThreads

if TYPE_CHECKING:
    from async_grpo.rollout.trl_trainer import GeneratedGroup, Scores

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Scored(Generic[Key]):
    """One group's outcome: scores, or the traceback of what a reward function raised."""

    key: Key
    group: GeneratedGroup
    scores: Scores | None
    error: str
    seconds: float


class Scoring(Generic[Key]):
    """Up to `at_most` groups at a time, each in a thread of its own; they come back as they are done.

    Asynchronous reward functions of all groups share TRL's one event loop.
    """

    def __init__(self, score: Callable[[GeneratedGroup], Scores], at_most: int) -> None:
        self._score = score
        self._at_most = at_most
        self._waiting: deque[tuple[Key, GeneratedGroup]] = deque()
        self._running = 0
        self._threads = KeptThreads()
        self._done: SimpleQueue[Scored[Key]] = SimpleQueue()
        self.on_done: Callable[[], None] = lambda: None  # called in a scoring thread: an outcome can be had

    @property
    def backlog(self) -> int:
        """Groups that wait for a thread."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether any group is waiting or being scored."""
        return bool(self._waiting) or self._running > 0

    def start(self, key: Key, group: GeneratedGroup) -> None:
        """Have `group` scored; its outcome comes out of `finished` with `key`."""
        self._waiting.append((key, group))
        self._fill()

    def finished(self, timeout_s: float) -> list[Scored[Key]]:
        """What is done by now; waits up to `timeout_s` for the first."""
        outcomes: list[Scored[Key]] = []
        try:
            while True:
                outcomes.append(self._done.get(timeout=0 if outcomes else timeout_s))
                self._running -= 1
        except Empty:
            self._fill()
            return outcomes

    def _fill(self) -> None:
        while self._waiting and self._running < self._at_most:
            key, group = self._waiting.popleft()
            self._running += 1
            self._threads.run(partial(self._run, key, group), name="scoring")

    def _run(self, key: Key, group: GeneratedGroup) -> None:
        self._done.put(score_one(self._score, key, group))
        self.on_done()


def score_one(score: Callable[[GeneratedGroup], Scores], key: Key, group: GeneratedGroup) -> Scored[Key]:
    """Score one group here and now; whatever the user's reward functions raise becomes the outcome's `error`."""
    started = time.monotonic()
    scores, error = None, ""
    try:
        scores = score(group)
    except Exception:  # noqa: BLE001  # the user's reward functions: whatever they raise belongs to the job
        error = traceback.format_exc()
    return Scored(key, group, scores, error, time.monotonic() - started)
