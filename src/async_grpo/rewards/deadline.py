"""A reward function with a deadline for each completion, kept by processes that can be killed.

    @with_deadline(seconds=5)
    def my_reward(completions, answer, **columns):
        ...

A time limit by signals works in the main thread only, and rewards run in others. Here a slow or endless completion
costs its own reward and one process, which is replaced. This isolates time, nothing else: code that a model wrote
belongs into the sandbox.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pebble import ProcessPool

Reward = Callable[..., Sequence[float | None]]

PROCESSES = 2  # of each function, in each process that calls it
SAY_AT_MOST = 3

_functions: list[Reward] = []  # by number: a forked process has them too, so that nothing of the user's is pickled


def with_deadline(
    *, seconds: float, late: float | None = 0.0, prepare: Callable[[], object] | None = None
) -> Callable[[Reward], Reward]:
    """Call a reward function once for each completion, for at most so many seconds each.

    The function sees one completion at a time: `completions` and every column hold one value. Its processes are forks
    of the caller's, made at the first call and kept: what it imports is imported once.

    Args:
        seconds: wall time of one completion, waiting for a free process not included.
        prepare: called once, before the processes are made; what it imports is there in all of them, at no one's cost.
        late: the reward of a completion that took longer, or that ended its process; None: no reward.

    Raises:
        ValueError: `seconds` is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}.")

    def decorate(function: Reward) -> Reward:
        _functions.append(function)
        pool = _Pool(len(_functions) - 1, seconds, late, prepare)

        @functools.wraps(function)
        def scored(completions: Sequence[Any], **columns: Any) -> list[float | None]:
            return pool.score(completions, columns)

        return scored

    return decorate


class _Pool:
    """The processes of one function."""

    def __init__(self, number: int, seconds: float, late: float | None, prepare: Callable[[], object] | None) -> None:
        self._number, self._seconds, self._late, self._prepare = number, seconds, late, prepare
        self._processes: ProcessPool | None = None
        self._owner = 0
        self._lock = Lock()
        self._said = 0

    def score(self, completions: Sequence[Any], columns: dict[str, Any]) -> list[float | None]:
        count = len(completions)
        each = {name: value for name, value in columns.items() if isinstance(value, list) and len(value) == count}
        calls = [
            self._schedule({"completions": [one], **{name: [values[index]] for name, values in each.items()}})
            for index, one in enumerate(completions)
        ]
        return [self._result(call) for call in calls]

    def _schedule(self, arguments: dict[str, Any]) -> Future[Any]:
        with self._lock:
            if self._processes is None or self._owner != os.getpid():  # a fork has no part in its parent's pool
                from pebble import ProcessPool

                if self._prepare is not None:
                    self._prepare()
                context = multiprocessing.get_context("fork")
                self._processes, self._owner = ProcessPool(max_workers=PROCESSES, context=context), os.getpid()
            found: Future[Any] = self._processes.schedule(_call, args=[self._number, arguments], timeout=self._seconds)
            return found

    def _result(self, call: Future[Any]) -> float | None:
        from pebble import ProcessExpired

        try:
            reward = call.result()
        except (TimeoutError, ProcessExpired) as error:
            self._say(error)
            return self._late
        return None if reward is None else float(reward)

    def _say(self, error: BaseException) -> None:
        from loguru import logger  # importing this room needs nothing but Python, for rewards in plain TRL

        self._said += 1
        if self._said <= SAY_AT_MOST:
            why = f"took over {self._seconds:g} s" if isinstance(error, TimeoutError) else "ended its process"
            more = "; more are not shown" if self._said == SAY_AT_MOST else ""
            name = getattr(_functions[self._number], "__name__", "a reward function")
            logger.warning("{} {} for a completion, whose reward is {}{}", name, why, self._late, more)


def _call(number: int, arguments: dict[str, Any]) -> float | None:
    """In a process of the pool."""
    (reward,) = _functions[number](**arguments)
    return reward
