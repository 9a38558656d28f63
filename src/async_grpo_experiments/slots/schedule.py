"""Runs tasks in places until all have ended or a stop is asked for.

A task is started when the tasks that it needs have finished and a place has room for it. By default it takes a place
alone. Of those that could start, the one of the highest priority is first, then the longest.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from async_grpo.errors import AsyncGRPOError, DiskFullError, UsageError
from async_grpo.launch.child_log import LogTail, last_line
from async_grpo.launch.host_memory import MemoryWatch
from async_grpo.launch.supervisor import Exit, exit_reason
from async_grpo_experiments.slots.ledger import (
    BLOCKED,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    WAITING,
    Ledger,
    Record,
    born,
)
from async_grpo_experiments.slots.places import Need, Packing, Place
from async_grpo_experiments.slots.starter import LOST, LocalStarter, OpenStarter, PlacedChild

OUT_OF_MEMORY = 77  # exit code of a task that says so of itself
LOOK_AT_MOST_S = 10.0  # of silence, between two looks at a log
PATIENCE = 10  # starts of others; a task that has waited for more is not overtaken any more
A_PLACE = Need()
ROOM_WAIT_S = 10.0  # between two tries to start a task on a full disk
MOST_LOST = 3  # a task whose process was lost so often has failed


class Command(NamedTuple):
    """How a task is started in its place."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    log: Path  # standard output and standard error are appended to it
    attempt: str = ""  # the name of this attempt, where a cluster starts it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to run once, in any place.

    Attributes:
        needs: names of tasks that must have finished before.
        need: what it takes of the places.
        need_now: what it takes, asked at each look; None: always `need`.
        priority: higher ones start first, among those that can.
        deadline_s: it is killed, and has failed, after so long.
        silence_s: it is killed, and has failed, when its log has said nothing for so long.
    """

    name: str
    command: Callable[[Place], Command]  # called when a place is free; raises `AsyncGRPOError` if it cannot start
    expected_s: float | None = None  # None: unknown
    grace_s: float = 10.0  # how long it may take to end after SIGTERM; then it is killed
    unfinished: Callable[[], str] | None = None  # why it is not done; by default its exit code says it
    reason: Callable[[], str] = lambda: ""  # why it failed, as it has written itself; empty: it has not
    needs: tuple[str, ...] = ()
    need: Need = A_PLACE
    need_now: Callable[[], Need] | None = None
    priority: float = 0.0
    deadline_s: float = math.inf
    silence_s: float = math.inf
    peak_bytes: Callable[[], int] = lambda: 0  # the most memory that it had, asked when it has ended
    ran_out: Callable[[], bool] = lambda: False  # whether it has noted that it was out of memory
    way_out: Callable[[Place], str] = lambda place: ""  # what would need less memory than this place has


class TaskSchedule:
    """The queue of tasks. What the ledger calls finished is not started again.

    >>> TaskSchedule([task], core_places(2), Ledger(path), say=print).run()[task.name].state
    'finished'

    Args:
        say: takes a sentence about each start and each end.
        look: called about ten times a second while anything runs.
        stagger_s: seconds between two starts: processes that load a model need most memory then.
        open_starter: makes what starts the children.

    Raises:
        UsageError: a task needs more than any place has, or a task that there is not.
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
        open_starter: OpenStarter = LocalStarter,
    ) -> None:
        self._ledger, self._say, self._look_outside, self._stagger_s = ledger, say, look, stagger_s
        self._packing = Packing(places)
        finished = {record.task for record in ledger.records.values() if record.state == FINISHED}
        todo = [task for task in tasks if task.name not in finished]
        _refuse_unknown_needs(todo, finished)
        self._packing.refuse((task.name, task.need) for task in todo)
        self._waiting = sorted(todo, key=_urgency)
        self._overtaken = dict.fromkeys((task.name for task in todo), 0)
        self._running: dict[str, _Running] = {}
        self._next_start = 0.0  # monotonic
        self._stops = 0
        self._starter = open_starter(say=say, look=self._turn)
        for task in self._waiting:
            before = ledger.records.get(task.name, Record(task=task.name, state=WAITING))
            ledger.put(Record(task=task.name, state=WAITING, seconds=before.seconds))

    def stop(self, *_: object) -> None:
        """Ask all tasks to end; asked again, kill them. A signal handler may call it."""
        self._stops += 1
        self._starter.stop()
        if self._stops > 1:
            self._starter.hurry()

    @property
    def stopping(self) -> bool:
        return self._stops > 0

    def run(self) -> Mapping[str, Record]:
        """Run to the end; returns the record of every task, also of those that an earlier queue has finished."""
        with self._starter as starter:
            starter.run_until(lambda exits: not self._running and not self._waiting)
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
        for name, ended in list(self._starter.exits.items()):
            self._starter.forget(name)
            self._conclude(self._running.pop(name), ended)

    def _start_some(self) -> None:
        while time.monotonic() >= self._next_start and (found := self._next()) is not None:
            task, place = found
            self._waiting = [other for other in self._waiting if other.name != task.name]
            self._start(task, place)

    def _next(self) -> tuple[Task, Place] | None:
        """The first task that can start, with its place. Those that it overtakes are counted."""
        passed: list[str] = []
        ready = list(self._in_turn())
        needs = [task.need if task.need_now is None else task.need_now() for task in ready]
        for task, need in zip(ready, needs, strict=True):
            if (place := self._packing.take(task.name, self._packing.spread(need, needs))) is not None:
                task = replace(task, need=need)  # what it got
                for name in passed:
                    self._overtaken[name] += 1
                return task, place
            if self._overtaken[task.name] >= PATIENCE:
                return None
            passed.append(task.name)
        return None

    def _in_turn(self) -> Iterator[Task]:
        """The tasks that need nothing any more: first those that were overtaken too often."""
        ready = [task for task in self._waiting if all(self._state(name) == FINISHED for name in task.needs)]
        yield from sorted(ready, key=lambda task: self._overtaken[task.name] < PATIENCE)

    def _state(self, name: str) -> str:
        return self._ledger.records[name].state

    def _start(self, task: Task, place: Place) -> None:
        try:
            command = task.command(place)
            log, health = LogTail(command.log, task.name), _TaskHealth(task, command.log)
            pid = self._starter.add(_child(task, place, command, health))
        except DiskFullError as error:
            self._packing.give_back(task.name)
            self._waiting.insert(0, task)
            self._next_start = time.monotonic() + ROOM_WAIT_S
            self._say(f"{task.name} waits for room on the disk: {error}")
            return
        except (OSError, AsyncGRPOError) as error:  # of this task alone: its log cannot be opened, it has no port left
            self._packing.give_back(task.name)
            self._ledger.change(task.name, state=FAILED, place=place.name, why=f"it could not be started: {error}")
            self._say(f"{task.name} could not be started: {error}")
            self._block(task.name)
            return
        now = time.monotonic()
        self._next_start = now + self._stagger_s
        self._running[task.name] = _Running(task, place, log, now, MemoryWatch(), health)
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
        self._packing.give_back(running.task.name)
        task, took = running.task, time.monotonic() - running.since
        words = "" if ended.code == 0 else running.log.last_words()
        out_of_memory = ended.code == OUT_OF_MEMORY or (ended.code != 0 and (task.ran_out() or running.lacked(ended)))
        state, why = self._verdict(running, ended, words, out_of_memory=out_of_memory)
        before = self._ledger.records[task.name]
        lost = before.lost + (ended.code == LOST and not running.health.passed)
        seconds, peak = round(before.seconds + took, 3), max(before.peak_bytes, task.peak_bytes())
        said = words if state == FAILED else ""
        self._ledger.change(
            task.name,
            state=state,
            code=ended.code,
            why=why,
            seconds=seconds,
            last_words=said,
            peak_bytes=peak,
            lost=lost,
        )
        self._say(f"{task.name} {state} after {took:.0f} s{f': {why}' if why else ''}")
        if state == WAITING:
            if out_of_memory:
                task = replace(task, need=replace(task.need, bytes=None), need_now=None)
            self._waiting.insert(0, task)
        if state == FAILED:
            self._block(task.name)

    def _block(self, failed: str) -> None:
        """Tasks that need a failed one, or one that needs it, will not start."""
        lost = {failed}
        while more := [task for task in self._waiting if lost.intersection(task.needs)]:
            for task in more:
                self._waiting.remove(task)
                self._ledger.change(task.name, state=BLOCKED, why=f"{failed} failed")
            lost.update(task.name for task in more)
        if len(lost) > 1:
            self._say(f"{failed} failed, so these will not start: {', '.join(sorted(lost - {failed}))}")

    def _verdict(self, running: _Running, ended: Exit, words: str, *, out_of_memory: bool) -> tuple[str, str]:
        task = running.task
        missing = task.unfinished() if task.unfinished is not None and ended.code in (0, LOST) else ""
        if not missing and (ended.code == 0 or (ended.code == LOST and task.unfinished is not None)):
            return FINISHED, ""
        if self.stopping:
            return STOPPED, "it was asked to stop"
        if running.health.passed:
            return FAILED, running.health.passed
        if out_of_memory and not task.need.alone:
            return WAITING, "out of memory beside others; it gets a place alone"
        if ended.code == LOST:
            lost = self._ledger.records[task.name].lost + 1
            return WAITING if lost < MOST_LOST else FAILED, f"its process was lost, {lost} of {MOST_LOST} times"
        if out_of_memory and (way_out := task.way_out(running.place)):
            return FAILED, f"out of memory alone on {way_out}"
        return FAILED, missing or f"{exit_reason(ended.code)}: {task.reason() or last_line(words)}"


class _Running(NamedTuple):
    """A task in its place."""

    task: Task
    place: Place
    log: LogTail
    since: float  # monotonic
    memory: MemoryWatch  # of this machine
    health: _TaskHealth

    def lacked(self, ended: Exit) -> bool:
        """Whether the kernel has killed it for lack of memory, as far as can be seen."""
        return ended.code == -signal.SIGKILL and self.memory.lacked()


def _child(task: Task, place: Place, command: Command, health: _TaskHealth) -> PlacedChild:
    return PlacedChild(
        name=task.name,
        command=command.arguments,
        env=command.env,
        log=command.log,
        grace_s=task.grace_s,
        health=health,
        cores=place.cores,
        attempt=command.attempt,
    )


class _TaskHealth:
    """The health of a task: how long it may take, and how long its log may say nothing.

    Silence is counted in looks: a runner that was itself stopped for a while has not heard anything either, and nobody
    looks at a job that waits in a cluster's queue.
    """

    def __init__(self, task: Task, log: Path) -> None:
        self._task, self._log = task, log
        self._began = self._looked = time.monotonic()
        self._bytes, self._silent_s = _bytes_of(log), 0.0
        self.passed = ""  # which limit it has passed

    def progress(self) -> object:
        return None

    def hang(self, pid: int) -> str:
        now, found = time.monotonic(), _bytes_of(self._log)
        self._silent_s = self._silent_s + min(now - self._looked, LOOK_AT_MOST_S) if found == self._bytes else 0.0
        self._looked, self._bytes = now, found
        if now - self._began > self._task.deadline_s:
            self.passed = f"it has taken {self._task.deadline_s:g} s, its deadline"
        elif self._silent_s > self._task.silence_s:
            self.passed = f"its log has said nothing for {self._task.silence_s:g} s"
        return self.passed


def _bytes_of(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:  # it is not there yet, or its file system is gone for a while
        return 0


def _urgency(task: Task) -> tuple[float, float]:
    return -task.priority, -(math.inf if task.expected_s is None else task.expected_s)


def _refuse_unknown_needs(tasks: Sequence[Task], finished: Collection[str]) -> None:
    known = {*finished, *(task.name for task in tasks)}
    for task in tasks:
        if missing := [name for name in task.needs if name not in known]:
            raise UsageError(f"{task.name} needs {missing[0]}, and there is no such task.")
