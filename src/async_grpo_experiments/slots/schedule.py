"""Runs tasks in places, each place one task at a time, until all have ended or a stop is asked for."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from async_grpo.errors import AsyncGRPOError
from async_grpo.launch.child_log import LogTail, last_line
from async_grpo.launch.supervisor import Child, Exit, Supervisor, exit_reason
from async_grpo_experiments.slots.ledger import FAILED, FINISHED, RUNNING, STOPPED, WAITING, Ledger, Record, born
from async_grpo_experiments.slots.places import Place

_HELD = Path(__file__).with_name("held.py")


class Command(NamedTuple):
    """How a task is started in its place."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    log: Path  # standard output and standard error are appended to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to run once, in any place."""

    name: str
    command: Callable[[Place], Command]  # called when a place is free; raises `AsyncGRPOError` if it cannot start
    expected_s: float | None = None  # None: unknown
    grace_s: float = 10.0  # how long it may take to end after SIGTERM; then it is killed
    unfinished: Callable[[], str] = lambda: ""  # why it is not done, although its exit code was 0
    reason: Callable[[], str] = lambda: ""  # why it failed, as it has written itself; empty: it has not


class TaskSchedule:
    """The queue of tasks. What the ledger calls finished is not started again.

    >>> Schedule([task], core_places(2), Ledger(path), say=print).run()[task.name].state
    'finished'

    Args:
        say: takes a sentence about each start and each end.
        look: called about ten times a second while anything runs.
        stagger_s: seconds between two starts: processes that load a model need most memory then.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        places: Sequence[Place],
        ledger: Ledger,
        *,
        say: Callable[[str], None],
        look: Callable[[], None] = lambda: None,
        stagger_s: float = 0.0,
    ) -> None:
        self._ledger, self._say, self._look_outside, self._stagger_s = ledger, say, look, stagger_s
        self._free = list(places)
        finished = {record.task for record in ledger.records.values() if record.state == FINISHED}
        todo = [task for task in tasks if task.name not in finished]
        self._waiting = sorted(todo, key=lambda task: -(math.inf if task.expected_s is None else task.expected_s))
        self._running: dict[str, _Running] = {}
        self._next_start = 0.0  # monotonic
        self._stops = 0
        self._supervisor = Supervisor([], say=say, look=self._turn)
        for task in self._waiting:
            before = ledger.records.get(task.name, Record(task=task.name, state=WAITING))
            ledger.put(Record(task=task.name, state=WAITING, seconds=before.seconds))

    def stop(self, *_: object) -> None:
        """Ask all tasks to end; asked again, kill them. A signal handler may call it."""
        self._stops += 1
        self._supervisor.stop()
        if self._stops > 1:
            self._supervisor.hurry()

    @property
    def stopping(self) -> bool:
        return self._stops > 0

    def run(self) -> Mapping[str, Record]:
        """Run to the end; returns the record of every task, also of those that an earlier queue has finished."""
        with self._supervisor as supervisor:
            supervisor.run_until(lambda exits: not self._running and not self._waiting)
            if self.stopping and self._running:
                self._say(f"stopping: {', '.join(self._running)}")
        self._reap()
        return self._ledger.records

    def _turn(self) -> None:
        self._reap()
        if not self.stopping:
            self._start_some()
        self._look_outside()

    def _reap(self) -> None:
        for name, ended in list(self._supervisor.exits.items()):
            self._supervisor.forget(name)
            self._conclude(self._running.pop(name), ended)

    def _start_some(self) -> None:
        while self._waiting and self._free and time.monotonic() >= self._next_start:
            self._start(self._waiting.pop(0), self._free.pop(0))

    def _start(self, task: Task, place: Place) -> None:
        try:
            command = task.command(place)
            log = LogTail(command.log, task.name)
            pid = self._supervisor.add(_child(task, place, command))
        except (OSError, AsyncGRPOError) as error:  # of this task alone: its log cannot be opened, it has no port left
            self._free.append(place)
            self._ledger.change(task.name, state=FAILED, place=place.name, why=f"it could not be started: {error}")
            self._say(f"{task.name} could not be started: {error}")
            return
        now = time.monotonic()
        self._next_start = now + self._stagger_s
        self._running[task.name] = _Running(task, place, log, now)
        self._ledger.change(
            task.name,
            state=RUNNING,
            place=place.name,
            pid=pid,
            born=born(pid),
            log=str(command.log),
            code=None,
            why="",
            last_words="",
        )
        self._say(f"{task.name} starts on {place.name} (pid {pid}), log {command.log}")

    def _conclude(self, running: _Running, ended: Exit) -> None:
        self._free.append(running.place)
        task, took = running.task, time.monotonic() - running.since
        words = "" if ended.code == 0 else running.log.last_words()
        state, why = self._verdict(task, ended, words)
        seconds = round(self._ledger.records[task.name].seconds + took, 3)
        said = words if state == FAILED else ""
        self._ledger.change(task.name, state=state, code=ended.code, why=why, seconds=seconds, last_words=said)
        self._say(f"{task.name} {state} after {took:.0f} s{f': {why}' if why else ''}")

    def _verdict(self, task: Task, ended: Exit, words: str) -> tuple[str, str]:
        missing = task.unfinished() if ended.code == 0 else ""
        if ended.code == 0 and not missing:
            return FINISHED, ""
        if self.stopping:
            return STOPPED, "it was asked to stop"
        return FAILED, missing or f"{exit_reason(ended.code)}: {task.reason() or last_line(words)}"


class _Running(NamedTuple):
    """A task in its place."""

    task: Task
    place: Place
    log: LogTail
    since: float  # monotonic


def _child(task: Task, place: Place, command: Command) -> Child:
    cores = ",".join(map(str, place.cores)) or "all"
    held = [sys.executable, "-I", "-S", str(_HELD), str(os.getpid()), cores]
    return Child(
        name=task.name, command=[*held, *command.arguments], env=command.env, log=command.log, grace_s=task.grace_s
    )
