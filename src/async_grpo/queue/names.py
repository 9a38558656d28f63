"""Names of queue files: what is in a name is the state of a job, so `ls` shows it and one rename changes it.

    queue/0000000042.a00_pending.safetensors              wants a worker
    queue/0000000042.a00_processing_by_dev1.safetensors   worker 1 has it
    queue/0000000042.a00_complete_from_dev1.safetensors   generated and scored
    done/0000000/0000000042.a00_complete_from_dev1.safetensors    the trainer has taken it
    done/0000000/0000000042.a01_duplicate_from_dev2.safetensors   a second result, never used
    quarantine/0000000043.a02_failed.safetensors          given up, with a .reason
    quarantine/0000000043.a02_retried.safetensors         it was given up, the resumed run tries it once more
    quarantine/0000000044.a00_broken_pending.safetensors  an unusable file, with a .reason

`a00` is the attempt. Names sort in the order of submission, jobs of evaluations last; modification times tie and lie.
Other files are not ours and are left alone.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from async_grpo.records import WorkerId

PENDING, PROCESSING, COMPLETE = "pending", "processing", "complete"
DUPLICATE, FAILED, BROKEN, RETRIED = "duplicate", "failed", "broken", "retried"

PENDING_END = "_pending.safetensors"
REASON_END = ".reason"
SEQS = 10**10  # sequence numbers are below it: a name has ten digits
SHARD_SIZE = 1000  # files a folder of done/
NOT_TRAINED_ON = 9_000_000_000  # sequence numbers from here on are of jobs that the trainer never gets: evaluations

_SUFFIX = ".safetensors"
_LINK = {PROCESSING: "_by_", COMPLETE: "_from_", DUPLICATE: "_from_"}
_QUEUE_NAME = re.compile(
    r"([0-9]{10})\.a([0-9]{2,3})_"
    rf"(?:(pending)|(processing)_by_({WorkerId.PATTERN})|(complete|duplicate)_from_({WorkerId.PATTERN}))\.safetensors"
)
_SET_ASIDE_NAME = re.compile(r"([0-9]{10})\.a([0-9]{2,3})_(failed|broken|retried)(_[a-z0-9_]+)?\.safetensors")


class JobName(NamedTuple):
    """A parsed name, e.g. `JobName(42, 0, "processing", "dev1")`; `str()` of it is the file name."""

    seq: int
    attempt: int  # 0 for the first try
    state: str
    worker: str | None = None  # the one that has or had the job, in the states that name one

    def __str__(self) -> str:
        worker = f"{_LINK[self.state]}{self.worker}" if self.state in _LINK else ""
        return f"{self.job}_{self.state}{worker}{_SUFFIX}"

    @property
    def trains(self) -> bool:
        """Whether the trainer gets the group."""
        return self.seq < NOT_TRAINED_ON

    @property
    def stem(self) -> str:
        return str(self).removesuffix(_SUFFIX)

    @property
    def job(self) -> str:
        """The job and its attempt without the state, e.g. `0000000042.a00`."""
        return f"{self.seq:010d}.a{self.attempt:02d}"

    def pending(self, attempt: int) -> JobName:
        return JobName(self.seq, attempt, PENDING)


@lru_cache(maxsize=16384)  # the same names are listed again and again, and at most 4,096 jobs are open
def parse_name(name: str) -> JobName | None:
    """The job that a file of queue/ or done/ belongs to, or None if the name is not exactly one of ours."""
    match = _QUEUE_NAME.fullmatch(name)
    if match is None:
        return None
    seq, attempt, pending, processing, claimer, finished, maker = match.groups()
    return JobName(int(seq), int(attempt), pending or processing or finished, claimer or maker)


class SetAside(NamedTuple):
    """A file of quarantine/: `kind` is failed (the job was given up), broken (only this file was) or retried."""

    seq: int
    attempt: int
    kind: str
    name: str


def parse_set_aside(name: str) -> SetAside | None:
    """What a file name in quarantine/ stands for, or None if it is not ours."""
    match = _SET_ASIDE_NAME.fullmatch(name)
    return SetAside(int(match[1]), int(match[2]), match[3], name) if match else None


def set_aside_name(job: JobName, kind: str) -> str:
    """Name in quarantine/ of a job that was given up (`failed`, `retried`) or of an unusable file (`broken`)."""
    state = f"_{job.stem.split('_', 1)[1]}" if kind == BROKEN else ""
    return f"{job.job}_{kind}{state}{_SUFFIX}"


def reason_name(set_aside: str) -> str:
    """Name of the text that says why."""
    return set_aside.removesuffix(_SUFFIX) + REASON_END


def shard(seq: int) -> str:
    """Folder of done/ in which the files of a job lie."""
    return f"done/{seq // SHARD_SIZE:07d}"
