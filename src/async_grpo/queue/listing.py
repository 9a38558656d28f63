"""What is in a queue, for its server, for `status` and for the command `queue`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from async_grpo.errors import BadFileError
from async_grpo.queue.filesystem import Files, OsFiles, job_files, set_aside_files
from async_grpo.queue.names import COMPLETE, FAILED, PENDING, PROCESSING, JobName, SetAside, reason_name


class QueueCounts(NamedTuple):
    """Job files by state."""

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


def why_set_aside(files: Files, set_aside: str) -> str:
    """The text that says why a file is in quarantine/."""
    try:
        return files.read(f"quarantine/{reason_name(set_aside)}").decode(errors="replace")
    except FileNotFoundError:
        return "no reason was written"
    except BadFileError as error:  # nothing but this text depends on the file
        return f"the reason cannot be read: {error}"


def counts_of(jobs: Iterable[JobName], aside: Iterable[SetAside]) -> QueueCounts:
    states = [name.state for name in jobs]
    failed = sum(entry.kind == FAILED for entry in aside)
    return QueueCounts(states.count(PENDING), states.count(PROCESSING), states.count(COMPLETE), failed)


def open_jobs(root: Path) -> list[JobName]:
    """Job files of queue/, oldest job first. Files that are renamed during the call may be missed, as in `ls`."""
    with closing(OsFiles(root)) as files:
        return sorted(job_files(files)) if files.exists("queue") else []


def queue_counts(root: Path | str) -> QueueCounts:
    """Count files by state; all zero where there is no queue yet."""
    with closing(OsFiles(Path(root))) as files:
        return counts_of(open_jobs(Path(root)), set_aside_files(files) if files.exists("quarantine") else ())


def quarantined(root: Path | str) -> list[Quarantined]:
    """Everything that was set aside, by job, each with its reason."""
    with closing(OsFiles(Path(root))) as files:
        return sorted(Quarantined(*aside, why_set_aside(files, aside.name)) for aside in set_aside_files(files))
