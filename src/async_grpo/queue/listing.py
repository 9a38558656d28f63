"""Looking at a queue, and mending it by hand, without being its server or a worker; safe on a live run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from async_grpo.queue.filesystem import Files, OsFiles
from async_grpo.queue.names import (
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
from async_grpo.queue.transitions import Moves, reason_of
from async_grpo.queue.wakeups import JobPipe


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroups:
    """Prompt groups by state; `oldest_*` is about the open one with the lowest number."""

    pending: int
    processing: int
    complete: int
    oldest_group: int | None = None
    oldest_state: str = ""
    oldest_s: float | None = None  # since it was issued, or finished; by the files' times, for people


def open_groups(root: Path) -> OpenGroups:
    """By one listing. Files that come and go may be missed, as in `ls`."""
    names = sorted(filter(None, map(parse_name, _listed(root / "queue"))))
    states = [name.state for name in names]
    oldest = names[0] if names else None
    return OpenGroups(
        pending=states.count(PENDING),
        processing=states.count(PROCESSING),
        complete=states.count(COMPLETE),
        oldest_group=oldest.seq if oldest else None,
        oldest_state=oldest.state if oldest else "",
        oldest_s=_age_s(root / "queue" / str(oldest)) if oldest else None,
    )


def given_up(root: Path) -> int:
    """How many jobs were given up."""
    return sum(
        aside is not None and aside.kind == FAILED for aside in map(parse_set_aside, _listed(root / "quarantine"))
    )


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is asked for
    except (FileNotFoundError, NotADirectoryError):
        return []


def _age_s(path: Path) -> float | None:
    try:
        return round(max(0.0, time.time() - path.stat(follow_symlinks=False).st_mtime), 3)
    except FileNotFoundError:  # it went on
        return None
