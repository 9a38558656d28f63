"""Looking at a queue, and mending it by hand, without being its server or a worker; safe on a live run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from async_grpo.job_pipe import JobPipe
from async_grpo.queue_files import Files, OsFiles
from async_grpo.queue_moves import Moves, reason_of
from async_grpo.queue_names import (
    COMPLETE,
    FAILED,
    PENDING,
    PROCESSING,
    JobName,
    SetAside,
    parse_name,
    parse_set_aside,
    reason_name,
)


class QueueCounts(NamedTuple):
    pending: int
    processing: int
    complete: int
    quarantined: int  # jobs given up; unusable files of jobs that were issued again are not counted


class Quarantined(NamedTuple):
    """A file of quarantine/ with the reason why it is there."""

    seq: int
    attempt: int
    kind: str  # failed: given up; broken: only the file was unusable; retried: given up, then tried again
    name: str
    reason: str


def counts_of(files: Files) -> QueueCounts:
    """Files in each state, by looking."""
    states = [name.state for name in map(parse_name, files.names("queue")) if name]
    failed = [aside for aside in _set_aside(files) if aside.kind == FAILED]
    return QueueCounts(states.count(PENDING), states.count(PROCESSING), states.count(COMPLETE), len(failed))


def queue_counts(root: Path | str) -> QueueCounts:
    """Files in each state, of a queue that this process is no part of."""
    files = OsFiles(Path(root))
    try:
        return counts_of(files)
    finally:
        files.close()


def quarantined(root: Path | str) -> list[Quarantined]:
    """Everything that was set aside, by job, each with its reason."""
    files = OsFiles(Path(root))
    try:
        return sorted(Quarantined(*aside, reason_of(files, aside.name)) for aside in _set_aside(files))
    finally:
        files.close()


def retry_given_up(root: Path | str, seq: int) -> bool:
    """Give a job of quarantine/ one more try, on a live run or not; False if no such job was given up."""
    files, pipe = OsFiles(Path(root)), JobPipe(Path(root))
    moves = Moves(files, "operator", pipe)
    try:
        for aside in _set_aside(files):
            if (aside.seq, aside.kind) == (seq, FAILED):
                pending = JobName(seq, aside.attempt + 1, PENDING)
                if moves.move(f"quarantine/{aside.name}", f"queue/{pending}"):
                    moves.drop(f"quarantine/{reason_name(aside.name)}")
                    return True
        return False
    finally:
        pipe.close()
        files.close()


def _set_aside(files: Files) -> list[SetAside]:
    return [aside for aside in map(parse_set_aside, files.names("quarantine")) if aside]


def done_folders(files: Files) -> list[str]:
    """The shards of done/, oldest jobs first."""
    return [f"done/{name}" for name in sorted(files.names("done")) if name.isdigit()]
