"""A reward function with a deadline for each completion, kept by processes that can be killed.

    @with_deadline(seconds=5)
    def my_reward(completions, answer, **columns):
        ...

A time limit by signals works in the main thread only, and rewards run in others. Here a slow or endless completion
costs its own reward and one process, which is replaced. This isolates time, nothing else: code that a model wrote
belongs into the sandbox.

The processes are forks, so that any function can be had, also one of a setup file or a closure. A fork shares the open
files of its parent, and would keep a pipe open whose end another thread waits for: it closes all but its own.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from queue import LifoQueue
from threading import Lock
from typing import Any

Reward = Callable[..., Sequence[float | None]]

PROCESSES = 2  # of each function, in each process that calls it
SAY_AT_MOST = 3
CALLER_S = 3.0  # that the caller has to end a process that is late


def with_deadline(
    *, seconds: float, late: float | None = 0.0, prepare: Callable[[], object] | None = None
) -> Callable[[Reward], Reward]:
    """Call a reward function once for each completion, for at most so many seconds each.

    The function sees one completion at a time: `completions` and every column hold one value. Its processes are forks
    of the caller's, made at the first call and kept.

    Args:
        seconds: wall time of one completion, waiting for a free process not included.
        late: the reward of a completion that took longer, or that ended its process; None: no reward.
        prepare: called once, before the processes are made; what it imports is there in all of them, at no one's cost.

    Raises:
        ValueError: `seconds` is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}.")

    def decorate(function: Reward) -> Reward:
        processes = _Processes(function, seconds, late, prepare)

        @functools.wraps(function)
        def scored(completions: Sequence[Any], **columns: Any) -> list[float | None]:
            return processes.score(completions, columns)

        return scored

    return decorate


class _Processes:
    """The processes of one function."""

    def __init__(
        self, function: Reward, seconds: float, late: float | None, prepare: Callable[[], object] | None
    ) -> None:
        self._function, self._seconds, self._late, self._prepare = function, seconds, late, prepare
        self._free: LifoQueue[_Process | None] = LifoQueue()  # None: one may be made
        self._owner = 0
        self._lock = Lock()
        self._said = 0

    def score(self, completions: Sequence[Any], columns: dict[str, Any]) -> list[float | None]:
        self._begin()
        count = len(completions)
        each = {name: value for name, value in columns.items() if isinstance(value, list) and len(value) == count}
        calls = [
            {"completions": [one], **{name: [values[index]] for name, values in each.items()}}
            for index, one in enumerate(completions)
        ]
        with ThreadPoolExecutor(PROCESSES) as threads:
            return list(threads.map(self._call, calls))

    def _begin(self) -> None:
        """At the first call, and at the first one of a fork, which has no part in the processes of its parent."""
        with self._lock:
            if self._owner == os.getpid():
                return
            if self._prepare is not None:
                self._prepare()
            self._free, self._owner = LifoQueue(), os.getpid()
            for _ in range(PROCESSES):
                self._free.put(None)

    def _call(self, arguments: dict[str, Any]) -> float | None:
        process = self._free.get()
        try:
            if process is None:
                with self._lock:  # so that the fork has no half-made one of another thread
                    process = _Process(self._function, self._seconds)
            answer, value = process.ask(arguments, self._seconds)
        except BaseException:  # an argument that cannot be sent; the process may have had half of it
            if process is not None:
                process.kill()
            self._free.put(None)
            raise
        if answer in (LATE, GONE):
            process.kill()
            self._free.put(None)
            self._say(answer)
            return self._late
        self._free.put(process)
        if answer == RAISED:
            raise value
        return None if value is None else float(value)

    def _say(self, what: str) -> None:
        from loguru import logger  # importing this room needs nothing but Python, for rewards in plain TRL

        self._said += 1
        if self._said <= SAY_AT_MOST:
            why = f"took over {self._seconds:g} s" if what == LATE else "ended its process"
            more = "; more are not shown" if self._said == SAY_AT_MOST else ""
            name = getattr(self._function, "__name__", "a reward function")
            logger.warning("{} {} for a completion, whose reward is {}{}", name, why, self._late, more)


RETURNED, RAISED, LATE, GONE = "returned", "raised", "late", "gone"


class _Process:
    """A fork of this process that calls the function whenever it is asked; it ends with its parent."""

    def __init__(self, function: Reward, seconds: float) -> None:
        self._pipe, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _serve(function, theirs, seconds)
            finally:
                os._exit(1)
        theirs.close()

    def ask(self, arguments: dict[str, Any], seconds: float) -> tuple[str, Any]:
        """What became of a call: RETURNED or RAISED with the value, LATE or GONE."""
        try:
            self._pipe.send(arguments)
            return self._pipe.recv() if self._pipe.poll(seconds) else (LATE, None)
        except (EOFError, ConnectionError):
            return GONE, None

    def kill(self) -> None:
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)  # it is our child, and not waited for: the number is its own
        os.waitpid(self._pid, 0)


def _serve(function: Reward, pipe: Connection, seconds: float) -> None:
    """In the fork: answer until the parent closes its end, or dies. An alarm ends a call that it died in."""
    mine = pipe.fileno()
    os.closerange(3, mine)
    os.closerange(mine + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        answer: tuple[str, Any]
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds + CALLER_S)
            (reward,) = function(**arguments)
            answer = (RETURNED, reward)
        except Exception as error:  # noqa: BLE001  # it is the caller's
            answer = (RAISED, error)
        try:
            pipe.send(answer)
        except Exception:  # noqa: BLE001  # an exception or a value that cannot be pickled
            pipe.send((RAISED, RuntimeError(f"{answer[0]} {answer[1]!r}")))
