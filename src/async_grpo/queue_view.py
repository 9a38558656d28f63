"""Looking at a queue, and mending it by hand, without being its server or a worker; safe on a live run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from async_grpo.queue_files import Files, OsFiles
from async_grpo.queue_moves import Moves
from async_grpo.queue_names import (
    COMPLETE,
    FAILED,
    PENDING,
    PROCESSING,
    JobName,
    parse_name,
    parse_set_aside,
    reason_name,
)


class QueueCounts(NamedTuple):
    pending: int
    processing: int
    complete: int
    quarantined: int  # jobs given up; unusable files of jobs that were issued again are not counted


def queue_counts(files: Files) -> QueueCounts:
    """Files in each state, by looking."""
    states = [name.state for name in map(parse_name, files.names("queue")) if name]
    asides = [aside for aside in map(parse_set_aside, files.names("quarantine")) if aside]
    failed = sum(aside.kind == FAILED for aside in asides)
    return QueueCounts(states.count(PENDING), states.count(PROCESSING), states.count(COMPLETE), failed)


def retry_given_up(root: Path | str, seq: int, files: Files | None = None) -> bool:
    """Give a job in quarantine/ one more try, on a live run or not; False if no such job was given up."""
    moves = Moves(files or OsFiles(Path(root)), "operator")
    for aside in filter(None, map(parse_set_aside, moves.files.names("quarantine"))):
        if (aside.seq, aside.kind) == (seq, FAILED):
            pending = JobName(seq, aside.attempt + 1, PENDING)
            if moves.move(f"quarantine/{aside.name}", f"queue/{pending}"):
                moves.drop(f"quarantine/{reason_name(aside.name)}")
                return True
    return False


def done_folders(files: Files) -> list[str]:
    """The shards of done/, oldest jobs first."""
    return [f"done/{name}" for name in sorted(files.names("done")) if name.isdigit()]
