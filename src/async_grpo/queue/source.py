"""Where a rollout worker gets its jobs from, whatever carries them."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple, Protocol

from async_grpo.queue.names import JobName
from async_grpo.records import Job, RolloutGroup


class Claim(NamedTuple):
    """A job that this worker has, until it completes, fails or hands it back."""

    job: Job
    attempt: int
    name: JobName


class JobSource(Protocol):
    """What a worker asks of a queue. `WorkerQueue` is the one on the files of a run directory of this machine.

    `JobSink` is the server's side.

    Every claim ends by `complete`, `fail` or `hand_back`. If the worker dies, its claims are other workers' again.
    """

    @property
    def name(self) -> str:
        """The worker's name, which its groups carry."""

    def claim(self, limit: int, skip: Container[int] = ()) -> list[Claim]:
        """Up to `limit` of the oldest pending jobs, without waiting. A job that failed before comes alone.

        skip: sequence numbers to leave to others, e.g. jobs that this worker handed back.

        `DiskFullError` if the oldest file is unusable and there is no room to say so; then nothing was claimed.
        """

    def complete(self, claim: Claim, group: RolloutGroup) -> None:
        """Hand over the result. `DiskFullError`: the claim is kept, call again.

        `BadGroupError` or `UnsupportedError`: the group holds what cannot be handed over; the claim is kept.
        """

    def fail(self, claim: Claim, error_text: str) -> None:
        """The job could not be done: pending again with the next attempt, or given up with `error_text` as its reason.

        `DiskFullError`: as for `complete`.
        """

    def hand_back(self, claim: Claim) -> None:
        """Pending again with the same attempt: this worker stops, or cannot serve the job now."""

    def wait(self, timeout_s: float, skip: Container[int] = ()) -> bool:
        """Sleep until there may be a job that is not in `skip`; False when the time is over."""

    def pending(self) -> int:
        """Jobs that no worker has."""

    def alive_workers(self) -> int:
        """Workers that are alive, this one included; may be a second old."""

    def served(self) -> bool:
        """Whether a live server issues jobs. One that is still loading does not yet."""
