"""A reward function with a deadline for each completion, kept by processes that can be killed.

    @with_deadline(seconds=5)
    def my_reward(completions, answer, **columns):
        ...

A time limit by signals works in the main thread only, and rewards run in others. Here a slow or endless completion
costs its own reward and one process, which is replaced. This isolates time, nothing else: code that a model wrote
belongs into the sandbox.

The processes are forks, so that any function can be had, also one of a setup file, of a notebook, or a closure. A fork
shares the open files of its parent, and would keep a pipe open whose end another thread waits for: it closes all that
have another end. What libraries poll with it keeps, since some start threads again in a fork (gRPC), which abort
without. A fork is asked something only once it has said that it is ready: one that dies before is made again, and costs
no completion its reward.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from typing import Any

Reward = Callable[..., Sequence[float | None]]

PROCESSES = 2  # of each function, in each process that calls it
SAY_AT_MOST = 3
CALLER_S = 3.0  # that the caller has to end a process that is late
READY_S = 10.0  # for a fork to begin
FORKS = 5  # of which one must become ready


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
        processes = _Forks(function, seconds, late, prepare)

        @functools.wraps(function)
        def scored(completions: Sequence[Any], **columns: Any) -> list[float | None]:
            return processes.score(completions, columns)

        scored.thread_safe = True  # type: ignore[attr-defined]  # the function itself runs in the processes
        return scored

    return decorate


class _Forks:
    """The processes of one function."""

    def __init__(
        self, function: Reward, seconds: float, late: float | None, prepare: Callable[[], object] | None
    ) -> None:
        self._function, self._seconds, self._late, self._prepare = function, seconds, late, prepare
        self._free: LifoQueue[_Fork | None] = LifoQueue()  # None: one may be made
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
                    process = self._ready_one()
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

    def _ready_one(self) -> _Fork:
        for _ in range(FORKS):
            process = _Fork(self._function, self._seconds)
            if process.is_ready():
                return process
            process.kill()
        raise RuntimeError(
            f"{_name(self._function)}: {FORKS} processes in a row died, or hung, before they were asked anything. A "
            "library that this process has loaded does not survive a fork; what it says is above. Call the function "
            "without with_deadline, or load that library in another process."
        )

    def _say(self, what: str) -> None:
        from async_grpo.log import logger  # importing this room needs nothing but Python, for rewards in plain TRL

        self._said += 1
        if self._said <= SAY_AT_MOST:
            why = f"took over {self._seconds:g} s" if what == LATE else "ended its process"
            more = "; more are not shown" if self._said == SAY_AT_MOST else ""
            logger.warning("{} {} for a completion, whose reward is {}{}", _name(self._function), why, self._late, more)


def _name(function: Reward) -> str:
    return getattr(function, "__name__", "a reward function")


READY, RETURNED, RAISED, LATE, GONE = "ready", "returned", "raised", "late", "gone"


class _Fork:
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

    def is_ready(self) -> bool:
        """Whether it has begun; waits for it. False: it died, or hangs."""
        try:
            return self._pipe.poll(READY_S) and self._pipe.recv() == (READY, None)
        except (EOFError, ConnectionError):
            return False

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
    _close_all_but(pipe.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe.send((READY, None))
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


def _close_all_but(mine: int) -> None:
    """Close files, pipes and sockets. What has no other end (epoll, eventfd, timers) stays."""
    for entry in [*Path("/proc/self/fd").iterdir()]:
        fd = int(entry.name)
        if fd > 2 and fd != mine:
            with suppress(OSError):  # that of the listing itself, and what another thread has closed
                if not str(entry.readlink()).startswith("anon_inode:"):
                    os.close(fd)
