"""The activity of each process of a run, in a file that others can read while it runs, hangs or is dead.

Every process maps a small file, `alive/NAME.status`, and writes into the mapping. That needs no system call, wakes no
process that watches the directory, and stays when the process hangs in C code or is killed.

    0  u64 count       changes with everything that the process does, named waits included
    8  f64 progress    when it last got something done: a token, a group, a step
    16 u32 length, u32 CRC32, then the rest of `ActivityRecord` as JSON of that length

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share until it restarts (`boot_id`). Whether a
process is alive is never read from here: the kernel's locks say that.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import BadFileError
from async_grpo.records import WorkerId
from async_grpo.rundir.files import space_for
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.paths import SERVER, activity_file
from async_grpo.rundir.reading import naming, open_plain, parse_object
from async_grpo.rundir.shape import shaped
from async_grpo_ipc.handle import boot_id

STARTING, LOADING, WAITING, ENDING = "starting", "loading", "waiting", "ending"
TRAINING, PUBLISHING, EVALUATING, SAVING = "training", "publishing", "evaluating", "saving"  # the server
ADOPTING, GENERATING, SCORING = "adopting weights", "generating", "scoring"  # a worker
BUSY_WORKER = (ADOPTING, GENERATING, SCORING)

FORMAT = 1
FILE_BYTES = 8192
MAX_CALLS, MAX_NAME = 8, 64  # tool calls in the record, the oldest; characters of a tool's name
MAX_JOBS = 32  # in the record; there are seldom more, and the oldest are the ones to look at
SAMPLE_EVERY_S = 5.0
SAMPLE_AGE_S = 60.0  # rates are over this long

_STATUS_FILE = re.compile(rf"({SERVER}|{WorkerId.PATTERN})\.status")
_HEAD = struct.Struct("<QdII")
_TICK = struct.Struct("<Qd")
COUNT_BYTES = 8


class JobActivity(NamedTuple):
    """A prompt group that a worker has."""

    seq: int
    phase: str  # GENERATING or SCORING
    since_s: float


class ToolCall(NamedTuple):
    """A call of a tool that a worker makes now and still waits for."""

    name: str
    since_s: float


class ActivitySample(NamedTuple):
    """Totals at one moment; the difference of two is a rate."""

    at_s: float
    spent_s: dict[str, float]


@dataclass(slots=True, kw_only=True)
class ActivityRecord:
    """The record of one process about itself. Fields that do not apply to it keep their default."""

    name: str = ""  # "server", "dev1"
    pid: int = 0
    device: str = ""  # "cpu", or the GPU's index
    run_id: str = ""
    boot_id: str = ""
    began_s: float = 0.0
    state: str = STARTING
    since_s: float = 0.0  # when the state began
    waits_for: str = ""  # what, in the state WAITING
    waits_on: tuple[str, ...] = ()  # names of the processes that could end the wait
    jobs: tuple[JobActivity, ...] = ()  # of a worker, oldest first
    calls: tuple[ToolCall, ...] = ()  # of tools, in a worker, oldest first
    version: int | None = None  # published by the server, adopted by a worker
    jobs_done: int = 0
    jobs_failed: int = 0
    step: int | None = None  # optimizer steps done; of the server
    total_steps: int | None = None
    max_staleness: int | None = None
    answered: int | None = None  # problems of an evaluation without training; of the server
    problems: int | None = None
    answered_eta_s: float | None = None  # seconds to the last of them
    stall_after_s: float = 60.0  # seconds without progress that count as a stall
    spent_s: dict[str, float] = field(default_factory=dict)  # seconds in each state, up to `since_s`
    minute_ago: ActivitySample = field(default=ActivitySample(0.0, {}))  # as it was SAMPLE_AGE_S ago, or when it began
    written_s: float = 0.0  # when this was written: once a second as long as the process runs Python at all
    progress_s: float = 0.0

    def spent(self, now: float) -> dict[str, float]:
        """Seconds in each state, the present one included."""
        spent = dict(self.spent_s)
        spent[self.state] = spent.get(self.state, 0.0) + max(0.0, now - self.since_s)
        return spent

    def share_of_last_minute(self, states: Iterable[str], now: float) -> float | None:
        """How much of the last minute the process was in one of `states`; None when it has only just begun."""
        elapsed = now - self.minute_ago.at_s
        if elapsed < 1.0:
            return None
        spent, before = self.spent(now), self.minute_ago.spent_s
        seconds = sum(spent.get(state, 0.0) - before.get(state, 0.0) for state in states)
        return min(1.0, max(0.0, seconds / elapsed))


class Activity:
    """The writer: `activity`, one for each process. It counts in memory until it is given a file.

    A change of state and a new job are written at once, everything else with them or by `flush()`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: mmap.mmap | bytearray = bytearray(FILE_BYTES)
        self._count = 0
        self._begin(state=STARTING)

    def _begin(self, **fields: Any) -> None:
        now = time.monotonic()
        self._samples = [ActivitySample(now, {})]
        self._now = ActivityRecord(
            pid=os.getpid(),
            boot_id=boot_id(),
            began_s=now,
            since_s=now,
            progress_s=now,
            minute_ago=self._samples[0],
            **fields,
        )
        self._jobs: dict[int, JobActivity] = {}
        self._calls: dict[int, ToolCall] = {}

    def publish(self, root: Path, name: str, *, device: str, run_id: str, state: str, stall_after_s: float) -> None:
        """Write to `alive/NAME.status` from now on, and start over: a process has one life."""
        path = activity_file(root, name)
        make_folder(path.parent)
        mapped = _map(path)
        with self._lock:
            (self._count,) = struct.unpack_from("<Q", mapped)  # continues that of an earlier process
            self._file = mapped
            self._begin(name=name, device=device, run_id=run_id, state=state, stall_after_s=stall_after_s)
            self._write()
            struct.pack_into("<d", mapped, COUNT_BYTES, self._now.progress_s)

    @property
    def state(self) -> str:
        return self._now.state

    def record(self) -> ActivityRecord:
        """As it was written last: `flush` brings it up to date."""
        with self._lock:
            return replace(self._now)

    def progress(self) -> None:
        """Something was done: a token was decoded, a group scored, a step taken."""
        self._now.progress_s = time.monotonic()
        self._tick()

    def doing(
        self, state: str, *, version: int | None = None, waits_for: str = "", waits_on: Sequence[str] = ()
    ) -> None:
        """The process is in this state from now on, if it is not already."""
        now, wait = self._now, (waits_for, tuple(waits_on))
        if (state, wait) == (now.state, (now.waits_for, now.waits_on)) and version is None:
            return
        with self._lock:
            if version is not None:
                now.version = version
            if state != now.state:
                entered = time.monotonic()
                now.spent_s = now.spent(entered)
                if now.state == LOADING:  # progress, however long it took; rates are about what comes after it
                    now.progress_s = entered
                    self._samples = [ActivitySample(entered, now.spent_s)]
                    now.minute_ago = self._samples[0]
                now.state, now.since_s = state, entered
            now.waits_for, now.waits_on = wait
            self._write()

    def waits(self, what: str, on: Sequence[str] = ()) -> None:
        """The process waits for `what`, which the processes named by `on` could provide. No progress, but no hang."""
        self.doing(WAITING, waits_for=what, waits_on=on)
        self._tick()

    def has_jobs(self, seqs: Iterable[int], phase: str) -> None:
        """A worker has these groups; they enter this phase now."""
        now = time.monotonic()
        with self._lock:
            jobs = {seq: JobActivity(seq, phase, now) for seq in seqs}
            is_news = not jobs.keys() <= self._jobs.keys()
            self._jobs.update(jobs)
            if is_news:  # if the worker hangs from here on, others must see that it has a job
                self._write()

    def no_longer_has(self, seq: int, *, done: bool = False, failed: bool = False) -> None:
        """A group was handed back to the queue: generated and scored, failed, or as it was."""
        with self._lock:
            self._jobs.pop(seq, None)
            self._now.jobs_done += done
            self._now.jobs_failed += failed
        self.progress()

    def calls_tool(self, number: int, name: str) -> None:
        """Note a call before it is made: if it keeps the interpreter, nothing in this process can say so any more."""
        with self._lock:
            self._calls[number] = ToolCall(name[:MAX_NAME], time.monotonic())
            self._write()

    def has_called_tool(self, number: int) -> None:
        """Forget a call, which has ended or was given up. Written with the next change."""
        with self._lock:
            self._calls.pop(number, None)

    def trains(self, *, step: int, total_steps: int, max_staleness: int) -> None:
        """Set how far the server is; written with the next change of state."""
        self._now.step, self._now.total_steps, self._now.max_staleness = step, total_steps, max_staleness

    def evaluates(self, *, answered: int, problems: int, eta_s: float | None) -> None:
        """Set how far an evaluation is, and write it at once."""
        with self._lock:
            self._now.answered, self._now.problems, self._now.answered_eta_s = answered, problems, eta_s
            self._write()
        self.progress()

    def flush(self) -> None:
        """Write what has changed, and keep a sample for the shares of the last minute."""
        now = time.monotonic()
        with self._lock:
            if now - self._samples[-1].at_s >= SAMPLE_EVERY_S:
                self._samples.append(ActivitySample(now, self._now.spent(now)))
            while len(self._samples) > 1 and now - self._samples[1].at_s >= SAMPLE_AGE_S:
                self._samples.pop(0)
            self._now.minute_ago = self._samples[0]
            self._write()

    def _tick(self) -> None:
        self._count += 1
        _TICK.pack_into(self._file, 0, self._count, self._now.progress_s)

    def _write(self) -> None:
        self._now.jobs = tuple(sorted(self._jobs.values(), key=lambda job: job.since_s)[:MAX_JOBS])
        self._now.calls = tuple(sorted(self._calls.values(), key=lambda call: call.since_s)[:MAX_CALLS])
        self._now.written_s = time.monotonic()
        record = {name: getattr(self._now, name) for name in _WRITTEN}
        data = json.dumps({"format": FORMAT, **record}, separators=(",", ":")).encode()
        if len(data) > FILE_BYTES - _HEAD.size:  # a very long text, which is also in the log
            data = json.dumps({"format": FORMAT, **record, "waits_for": "", "waits_on": ()}).encode()
        self._file[_HEAD.size : _HEAD.size + len(data)] = data
        struct.pack_into("<II", self._file, _TICK.size, len(data), zlib.crc32(data))


_WRITTEN = tuple(field.name for field in fields(ActivityRecord) if field.name != "progress_s")

activity = Activity()


def read_count(path: Path) -> bytes | None:
    """The counter; None if there is no file. Only changes of it mean anything."""
    return _read(path, COUNT_BYTES) or None


def read_activity(path: Path) -> ActivityRecord | None:
    """The record that the process wrote last; None if the file is missing, broken or of another format."""
    for _ in range(5):  # it may be written just now
        data = _read(path, FILE_BYTES)
        if len(data) < _HEAD.size:
            return None
        _, progress_s, length, crc = _HEAD.unpack_from(data)
        body = data[_HEAD.size : _HEAD.size + length]
        if zlib.crc32(body) == crc:
            return _parse(body, progress_s)
        time.sleep(0.0002)
    return None


def read_all(root: Path) -> dict[str, ActivityRecord]:
    """The records of every process that has run in this directory, by name, dead ones included.

    Files of other names, such as copies, are ignored.
    """
    try:
        entries = [entry for entry in os.scandir(root / "alive") if entry.is_file(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    files = sorted(entry.name for entry in entries if _STATUS_FILE.fullmatch(entry.name))
    found = {file.removesuffix(".status"): read_activity(root / "alive" / file) for file in files}
    return {name: record for name, record in found.items() if record is not None}


def _parse(body: bytes, progress_s: float) -> ActivityRecord | None:
    try:
        data = parse_object(body)
        if data.pop("format", None) != FORMAT:
            return None
        return shaped(ActivityRecord, {**data, "progress_s": progress_s})
    except BadFileError:
        return None


def _read(path: Path, at_most: int) -> bytes:
    try:
        fd = open_plain(path)
    except (FileNotFoundError, BadFileError):
        return b""
    try:
        return os.pread(fd, at_most, 0)
    finally:
        os.close(fd)


def _map(path: Path) -> mmap.mmap:
    with naming(path):
        descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
    try:
        with space_for(path):
            os.posix_fallocate(descriptor, 0, FILE_BYTES)  # a full disk is an error here, not a SIGBUS later
            return mmap.mmap(descriptor, FILE_BYTES)
    finally:
        os.close(descriptor)
