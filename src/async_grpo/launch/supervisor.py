"""Starts child processes, watches them, starts them again, and ends them. What the children do is not known here.

A signal goes only to a process that was started here and has not been waited for, so no other process can have its pid,
and to those of its group that it has left behind. A child that must not outlive a killed supervisor asks the kernel for
it: `setup.process.end_with_parent`.
"""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from async_grpo.setup.process import end_left_behind, has_ended, start_logged

POLL_S = 0.1
FIRST_PAUSE_S = 1.0  # before a restart; it doubles with each restart in a row
MAX_RESTARTS_IN_A_ROW = 5
LIVED_LONG_ENOUGH_S = 60.0  # a child that lived this long counts its restarts from zero again


class Health(Protocol):
    """What can be seen of a child from outside."""

    def progress(self) -> object:
        """A value that changes whenever the child gets something done."""

    def hang(self, pid: int) -> str:
        """Why the child with this pid must be killed; empty if it need not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A child that ends is started again after 1, 2, 4, … seconds, at most five times in a row."""

    unless_first_exit: int | None = None  # exit code of a first start that all others would repeat
    while_needed: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path  # standard output and standard error are appended to it
    grace_s: float  # how long it may take to end after SIGTERM; then it is killed
    restart: Restart | None = None  # None: its first exit is final
    health: Health | None = None


class Exit(NamedTuple):
    code: int  # negative: the signal that killed it
    pid: int
    starts: int  # how often the child was started


Exits = Mapping[str, Exit]  # by the child's name


class Supervisor:
    """Runs children in a `with` block; those that still run at its end are ended.

    >>> with Supervisor([child], say=print) as supervisor:
    ...     supervisor.run_until(lambda exits: child.name in exits)

    Args:
        say: takes a sentence about each restart and each hang.
        look: called about ten times a second while anything runs.
    """

    def __init__(
        self, children: Sequence[Child], *, say: Callable[[str], None], look: Callable[[], None] = lambda: None
    ) -> None:
        self._processes = [_RunningChild(child) for child in children]
        self._say, self._look = say, look
        self.stopping = False
        self._hurry = False
        self.exits: dict[str, Exit] = {}  # of the children that will not be started again
        self.died: dict[str, int] = {}  # exit codes of those that were found dead when all were to end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def stop(self, *_: object) -> None:
        """Make `run_until` return. A signal handler may call it."""
        self.stopping = True

    def hurry(self) -> None:
        """Let `end` kill what still runs instead of waiting for the grace. A signal handler may call it."""
        self._hurry = True

    def add(self, child: Child) -> int:
        """Start one more child, and watch it from now on; returns its pid. `OSError` if it cannot be started."""
        process = _RunningChild(child)
        process.start()
        self._processes.append(process)
        return process.pid

    def forget(self, name: str) -> None:
        """Drop a child that has ended for good: a supervisor of many short ones must not grow."""
        del self.exits[name]
        self._processes = [process for process in self._processes if process.child.name != name]

    def run_until(self, first_exit: Callable[[Exits], bool]) -> Exits:
        """Start every child, and watch them until `first_exit` holds or a stop is asked for."""
        for index, process in enumerate(self._processes):
            if self.stopping and index > 0:  # the first is started in any case: its exit says how the run ended
                break
            process.start()
        while not self.stopping and not first_exit(self.exits):
            self._look()
            for process in list(self._processes):  # `look` may add some and forget others
                self._watch(process)
            time.sleep(POLL_S)
        return self.exits

    def end(self, *, ask: bool = True, first: Container[str] = ()) -> None:
        """End all children and return when they are gone: SIGTERM if `ask`, and SIGKILL to each after its grace.

        first: names of those that end before the others are asked to.
        """
        self._note_dead()
        self._end([process for process in self._processes if process.child.name in first], ask=ask)
        self._end(self._processes, ask=ask)
        for process in self._processes:
            if process.starts:
                self.exits[process.child.name] = process.exit()
        if not ask:  # they were to end by themselves
            self._note_dead()
        self._look()

    def _note_dead(self) -> None:
        for process in self._processes:
            if process.starts and not process.running and not process.was_ended and process.exit().code:
                self.died[process.child.name] = process.exit().code

    def _end(self, processes: Sequence[_RunningChild], *, ask: bool) -> None:
        began = time.monotonic()
        for process in processes:
            if ask:
                process.send(signal.SIGTERM)
        while left := [process for process in processes if process.running]:
            for process in left:
                if self._hurry or time.monotonic() - began > process.child.grace_s:
                    process.was_ended = True
                    process.send(signal.SIGKILL)
            self._look()
            time.sleep(POLL_S)

    def _watch(self, process: _RunningChild) -> None:
        name, restart = process.child.name, process.child.restart
        if process.running:
            if reason := process.hang():
                self._say(f"killing {name}: {reason}")
                process.send(signal.SIGKILL)
        elif name in self.exits or (restart is not None and not restart.while_needed()):
            return
        elif (when := process.next_start()) == math.inf:
            self.exits[name] = process.exit()
        elif time.monotonic() >= when:
            self._say(f"{name} ended ({exit_reason(process.exit().code)}); starting it again")
            process.start()


class _RunningChild:
    """A child, and what became of it so far."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.starts = 0
        self.was_ended = False  # by `Supervisor.end`, as it took longer than its grace
        self._popen: subprocess.Popen[bytes] | None = None
        self._started = 0.0  # monotonic
        self._progress_at_start: object = None
        self._restarts_in_a_row = 0
        self._next_start: float | None = None  # monotonic; infinite: never; None: not decided

    def start(self) -> None:
        self._popen = start_logged(self.child.command, self.child.env, self.child.log)
        self.starts += 1
        self._started = time.monotonic()
        self._next_start = None
        self._progress_at_start = self._progress()

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def running(self) -> bool:
        if self._popen is not None and self._popen.returncode is None and has_ended(self._popen):
            end_left_behind(self._popen.pid)  # such as the processes of a reward function
        return self._popen is not None and self._popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Signal the process if it runs; after SIGKILL it is waited for."""
        if self._popen is not None:
            self._popen.send_signal(number)
            while number == signal.SIGKILL and self.running:
                time.sleep(POLL_S / 10)

    def exit(self) -> Exit:
        assert self._popen is not None
        return Exit(self._popen.returncode, self._popen.pid, self.starts)

    def hang(self) -> str:
        assert self._popen is not None
        return self.child.health.hang(self._popen.pid) if self.child.health is not None else ""

    def next_start(self) -> float:
        """When to start the process that has ended again; infinite: never."""
        if self._next_start is None:
            now = time.monotonic()
            if now - self._started > LIVED_LONG_ENOUGH_S or self._was_killed_at_work():
                self._restarts_in_a_row = 0
            self._next_start = now + FIRST_PAUSE_S * 2**self._restarts_in_a_row if self._may_restart() else math.inf
            self._restarts_in_a_row += 1
        return self._next_start

    def _may_restart(self) -> bool:
        restart, exit = self.child.restart, self.exit()
        if restart is None or (exit.starts == 1 and exit.code == restart.unless_first_exit):
            return False
        return self._restarts_in_a_row < MAX_RESTARTS_IN_A_ROW

    def _was_killed_at_work(self) -> bool:
        """Whether another process killed it after it had got something done: not a fault of its own."""
        return self.exit().code == -signal.SIGKILL and self._progress() != self._progress_at_start

    def _progress(self) -> object:
        return self.child.health.progress() if self.child.health is not None else None


def exit_reason(code: int) -> str:
    """`exit code 1`, `killed by SIGSEGV`."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
