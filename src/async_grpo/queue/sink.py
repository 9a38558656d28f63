"""Where the parameter server puts jobs and takes finished groups from, whatever carries them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple, Protocol

from async_grpo.queue.listing import QueueCounts
from async_grpo.queue.liveness import WorkerState
from async_grpo.queue.names import JobName
from async_grpo.records import Job, Purpose, RolloutGroup


class GivenUp(NamedTuple):
    """A job that failed as often as it may."""

    job: Job
    attempt: int  # of the last try
    reason: str  # e.g. the traceback


class JobSink(Protocol):
    """What the server's side asks of a queue. `ServerQueue` is the one on the files of a run directory.

    Every job that was submitted is taken, once, or ends in `given_up`. `JobSource` is the workers' side.
    """

    @property
    def given_up(self) -> Mapping[int, GivenUp]:
        """The jobs that failed for good, by sequence number, in the order in which it was noticed."""

    @property
    def open_jobs(self) -> int:
        """Jobs issued, and neither taken nor given up."""

    def new_seq(self) -> int:
        """The next sequence number for a job that is not trained on."""

    def submit(self, job: Job) -> None:
        """Issue a job, or adopt what an earlier server left of it. `DiskFullError`: it was not issued, call again."""

    def finished(self, purpose: Purpose = "train") -> list[JobName]:
        """Finished groups of open jobs for this purpose, oldest first, one a job."""

    def take(self, entry: JobName) -> RolloutGroup | None:
        """Check and archive a finished group, and close its job. None: it was unusable, or another's duplicate.

        `DiskFullError`: it is still there, call again.
        """

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there may be something new; False when the time is over."""

    def unclaimed(self) -> list[int]:
        """Open jobs that no worker has, by sequence number, oldest first."""

    def counts(self) -> QueueCounts:
        """How many jobs are in each state."""

    def claimants(self) -> list[str]:
        """Names of the workers that have a job."""

    def workers(self) -> list[WorkerState]:
        """The workers that are alive."""

    def short_of_room(self) -> bool:
        """Whether workers find no room for a group, and wait."""

    def trim_done(self, keep: int, consumed: Container[int]) -> int:
        """Delete the oldest archived groups of `consumed` beyond `keep`; returns how many."""
