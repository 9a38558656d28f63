"""Processes that make no progress: stalled ones, which say so themselves, and hung workers, which a launcher kills.

A process is stalled if for a while neither it nor any process that it waits for, directly or through others, has got
anything done. `StallReporter` warns about the stalls of its own process. A worker hangs if it has a job and nothing in
it moves, not even a named wait, or if a tool keeps its interpreter: `HangDetector`. Processes that are loading a model
get four extra minutes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from async_grpo.formatting import for_people
from async_grpo.log import logger
from async_grpo.records import WorkerId
from async_grpo.rundir.paths import activity_file
from async_grpo.telemetry.activity import (
    LOADING,
    WAITING,
    Activity,
    ActivityRecord,
    read_activity,
    read_all,
    read_count,
)

LOOK_S = 1.0
LOADING_S = 240.0  # counts as progress
TOOL_GRACE_S = 10.0  # after --tool-timeout, for a worker to give a call up itself


def last_progress_s(name: str, records: Mapping[str, ActivityRecord]) -> float:
    """When `name` or a process that it waits for last got something done, on the monotonic clock.

    Loading counts as progress for four minutes, so this may lie in the future.
    """
    latest, to_ask, asked = 0.0, [name], set()
    while to_ask:
        asked.add(one := to_ask.pop())
        if (record := records.get(one)) is not None:
            latest = max(latest, record.progress_s + (LOADING_S if record.state == LOADING else 0.0))
            to_ask += [other for other in record.waits_on if record.state == WAITING and other not in asked]
    return latest


def describe(record: ActivityRecord, now: float) -> str:
    """`waiting 61 s for 4 more groups from 2 workers`, `scoring group 13 for 75 s`."""
    if record.state == WAITING:
        what = f" for {record.waits_for}" if record.waits_for else ""
        return f"waiting {for_people(now - record.since_s)}{what}"
    jobs = [job for job in record.jobs if job.phase == record.state] or list(record.jobs)
    if not jobs:
        return f"{record.state} for {for_people(now - record.since_s)}"
    groups = f"group {jobs[0].seq}" if len(jobs) == 1 else f"{len(jobs)} groups"
    return f"{jobs[0].phase} {groups} for {for_people(now - jobs[0].since_s)}"


def explain(name: str, records: Mapping[str, ActivityRecord], now: float) -> str:
    """Say what `name` does, and what the processes do that it waits for."""
    record = records[name]
    parts = [describe(record, now)]
    if record.state == WAITING:
        others = [records[other] for other in record.waits_on if other in records]
        parts += [f"{other.name} is {describe(other, now)}" for other in others]
    return "; ".join(parts)


class StallReporter:
    """A thread that warns once in each stall, and again each time it has lasted twice as long.

    It also writes the record of `activity` once a second. It runs while the main thread hangs in the user's code, or in
    C code that releases the GIL.

    Args:
        root: the run directory, to read what the other processes do.
        after_s: seconds without progress that count as a stall.
    """

    def __init__(self, activity: Activity, root: Path, after_s: float) -> None:
        self._activity, self._root, self._after_s = activity, root, after_s
        self._next_s = after_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-reporter", daemon=True)

    def start(self) -> StallReporter:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(LOOK_S, self._after_s / 4)):
            self._activity.flush()
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Warn if it is time to."""
        own = self._activity.record()
        if now - own.progress_s < self._after_s:
            self._next_s = self._after_s
            return
        records = {**read_all(self._root), own.name: own}
        stalled_s = now - last_progress_s(own.name, records)
        if stalled_s < self._after_s:
            self._next_s = self._after_s
        elif stalled_s >= self._next_s:
            self._next_s = 2 * stalled_s
            logger.warning("no progress for {}: {}", for_people(stalled_s), explain(own.name, records, now))


class HangDetector:
    """Tells when a worker hangs: it has a job, and for `timeout_s` nothing of it has moved.

    A worker that loads, or waits for a job, has none. A worker also hangs if no thread of it has run since a tool call
    became overdue: the call holds the interpreter's lock, so the worker cannot give it up.

    Args:
        tool_timeout_s: after which a worker gives a tool call up.
    """

    def __init__(self, root: Path, worker: WorkerId, timeout_s: float, *, tool_timeout_s: float = math.inf) -> None:
        self._file = activity_file(root, str(worker))
        self._timeout_s, self._tool_timeout_s = timeout_s, tool_timeout_s
        self._seen: bytes | None = None
        self._since = time.monotonic()

    def progress(self) -> bytes | None:
        """The count of the worker, or of an earlier one of its name, so far."""
        return read_count(self._file)

    def hang(self, pid: int) -> str:
        """Why the worker with this pid counts as hung; empty if it does not."""
        now, count = time.monotonic(), self.progress()
        if count != self._seen:
            self._seen, self._since = count, now
        if now - self._since <= min(self._timeout_s, self._tool_timeout_s + TOOL_GRACE_S):
            return ""
        record = read_activity(self._file)
        if record is None or record.pid != pid:
            return ""
        return self._kept_by_a_tool(record, now) or self._makes_no_progress(record, now)

    def _kept_by_a_tool(self, record: ActivityRecord, now: float) -> str:
        if not record.calls:
            return ""
        still_s = now - max(record.written_s, record.calls[0].since_s)
        if still_s <= self._tool_timeout_s + TOOL_GRACE_S:
            return ""
        names = ", ".join(dict.fromkeys(call.name for call in record.calls))
        return (
            f"for {still_s:.0f} s a tool call has kept its interpreter, so it cannot give the call up after "
            f"{self._tool_timeout_s:g} s (--tool-timeout). Running: {names}. Such a call (a regular expression, a loop "
            "in C) needs a process of its own that the tool can end"
        )

    def _makes_no_progress(self, record: ActivityRecord, now: float) -> str:
        if not record.jobs or now - self._since <= self._timeout_s:
            return ""
        if now - min(job.since_s for job in record.jobs) <= self._timeout_s:
            return ""
        return f"no progress for {self._timeout_s:g} s; it was {describe(record, now)}"
