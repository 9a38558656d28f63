"""What the files of a run say about its prompt groups: one snapshot, for `audit` to judge. Changes nothing.

The folders are read in the order in which a group goes through them (queue/, done/, the record), so that one which
moves on meanwhile is seen at least once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from async_grpo.archive import rollout_state
from async_grpo.archive.groups import finished_group
from async_grpo.archive.history import Dropped, Started, UsedBatch, parse_entry
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import BadFileError
from async_grpo.queue.codec import decode_job
from async_grpo.queue.filesystem import Files, OsFiles
from async_grpo.queue.listing import done_folders
from async_grpo.queue.names import (
    COMPLETE,
    DUPLICATE,
    FAILED,
    JobName,
    SetAside,
    parse_name,
    parse_set_aside,
    reason_name,
)
from async_grpo.rundir.paths import RunDir, RunState


class Stored(NamedTuple):
    """A finished group as its file tells."""

    name: JobName
    worker: str
    policy_version: int


@dataclass(slots=True)
class Process:
    """What one parameter server process wrote into the record, from its first line on."""

    resumed_from: int | None  # step of its checkpoint
    max_staleness: int
    batches: list[tuple[int, UsedBatch]] = field(default_factory=list)  # (optimizer step, what it used)
    dropped: list[int] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((step for step, _ in self.batches), default=self.resumed_from or 0)

    def seqs(self) -> set[int]:
        """Every sequence number that it used or dropped."""
        return {seq for _, batch in self.batches for seq in batch.seqs} | set(self.dropped)


@dataclass(slots=True)
class Evidence:
    """One snapshot."""

    queue: list[JobName] = field(default_factory=list)
    done: dict[int, list[JobName]] = field(default_factory=dict)  # finished groups, and second results
    stored: dict[JobName, Stored] = field(default_factory=dict)  # of every finished group that is sound
    set_aside: list[SetAside] = field(default_factory=list)
    without_reason: list[str] = field(default_factory=list)
    checkpoints: list[RolloutState] = field(default_factory=list)  # complete ones of this run, oldest first
    processes: list[Process] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # a sentence for each file that cannot be used


class Reader:
    """Takes snapshots of one run; a file that was found sound is not read a second time."""

    def __init__(self, run: RunDir, state: RunState) -> None:
        self._run, self._state = run, state
        self._sound: dict[str, Stored | None] = {}

    def look(self) -> Evidence:
        found = Evidence()
        files = OsFiles(self._run.root)
        try:
            for name in _job_names(files, "queue"):
                found.queue.append(name)
                self._check(files, "queue", name, found)
            for folder in done_folders(files) if files.exists("done") else []:
                for name in _job_names(files, folder):
                    if self._check(files, folder, name, found):
                        found.done.setdefault(name.seq, []).append(name)
            self._look_at_quarantine(files, found)
        finally:
            files.close()
        self._look_at_checkpoints(found)
        self._look_at_record(found)
        return found

    def _check(self, files: Files, folder: str, name: JobName, found: Evidence) -> bool:
        """Read a file of queue/ or done/; False if it is not there any more."""
        path = f"{folder}/{name}"
        if path not in self._sound:
            try:
                self._sound[path] = _stored(files.read(path), name, self._state.run_id)
            except FileNotFoundError:
                return False
            except BadFileError as error:
                found.broken.append(f"{path} is broken: {error}.")
                return True
        stored = self._sound[path]
        if stored is not None:
            found.stored[name] = stored
        return True

    def _look_at_quarantine(self, files: Files, found: Evidence) -> None:
        names = set(files.names("quarantine")) if files.exists("quarantine") else set()
        found.set_aside = sorted(filter(None, map(parse_set_aside, names)))
        found.without_reason = [
            aside.name for aside in found.set_aside if aside.kind == FAILED and reason_name(aside.name) not in names
        ]

    def _look_at_checkpoints(self, found: Evidence) -> None:
        output_dir = Path(self._state.output_dir) if self._state.output_dir else None
        for path in output_dir.glob(f"checkpoint-*/{rollout_state.FILE_NAME}") if output_dir else []:
            try:
                state = RolloutState(**json.loads(path.read_text()))
            except FileNotFoundError:
                continue  # an old checkpoint made room for a new one
            except (ValueError, TypeError) as error:
                found.broken.append(f"{path} is broken: {error}.")
                continue
            if state.run_id == self._state.run_id:
                found.checkpoints.append(state)
        found.checkpoints.sort(key=lambda state: state.step)

    def _look_at_record(self, found: Evidence) -> None:
        try:
            text = self._run.consumption.read_text(errors="replace")
        except FileNotFoundError:
            return
        *lines, rest = text.split("\n")
        for number, line in enumerate([*lines, rest] if rest else lines, start=1):
            reason = _add_to_record(found.processes, line, self._state.run_id)
            if reason:
                found.broken.append(f"Line {number} of {self._run.consumption.name} is broken: {reason}.")


def _job_names(files: Files, folder: str) -> list[JobName]:
    if not files.exists(folder):
        return []
    return sorted(name for entry in files.names(folder) if (name := parse_name(entry)) is not None)


def _stored(data: bytearray, name: JobName, run_id: str) -> Stored | None:
    """What a finished group's file tells, None for a job; `BadFileError` for what is neither."""
    if name.state not in (COMPLETE, DUPLICATE):
        decode_job(data, expect_seq=name.seq, expect_run=run_id)
        return None
    group = finished_group(data, name, run_id)
    return Stored(name, group.worker, group.policy_version)


def _add_to_record(processes: list[Process], line: str, run_id: str) -> str | None:
    """Take one line of the record in; what is wrong with it, or None."""
    try:
        entry = parse_entry(line)
    except ValueError as error:
        return str(error)
    if isinstance(entry, Started):
        if entry.run_id != run_id:
            return f"it is of run {entry.run_id}, this is run {run_id}"
        processes.append(Process(entry.resumed_from, entry.max_staleness))
    elif not processes:
        return "no line before it says which process wrote it"
    elif isinstance(entry, Dropped):
        processes[-1].dropped.append(entry.seq)
    else:
        processes[-1].batches.append((entry.step, entry.batch))
    return None
