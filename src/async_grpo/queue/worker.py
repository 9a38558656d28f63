"""A worker's side of the queue. The protocol is told in `job_queue`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Self

from async_grpo.errors import BadFileError, DiskFullError, QueueError
from async_grpo.queue.codec import decode_job, encode_group
from async_grpo.queue.filesystem import Files, OsFiles, prepare_root
from async_grpo.queue.listing import counts_of
from async_grpo.queue.liveness import LOOK_S, live_workers, server_lock, worker_lock
from async_grpo.queue.names import BROKEN, COMPLETE, PENDING_END, PROCESSING, JobName, parse_name
from async_grpo.queue.transitions import DEFAULT_MAX_ATTEMPTS, Moves
from async_grpo.queue.wakeups import EVERYTHING, JobPipe, sleep_until
from async_grpo.records import Job, RolloutGroup, WorkerId
from async_grpo.rundir.locks import describe_holder

_BELIEVE_S = 0.05  # how long a worker goes by the pipe alone: an older job that is not in it must not wait behind newer
_COUNT_S = 1.0
_TAKEOVER_S = 5.0  # how long a starting worker waits while the server tidies up after its predecessor


class Claim(NamedTuple):
    """A job that this worker has, until it completes, fails or hands it back."""

    job: Job
    attempt: int
    name: JobName


class WorkerQueue:
    """One worker process' side, for one thread. Its lock lasts as long as the process.

    A forked child has no part in it.
    """

    def __init__(self, root: Path, worker: WorkerId, files: Files, *, durable: bool) -> None:
        self.root, self.id = root, worker
        self._durable = durable
        self._pipe = JobPipe(root)
        self._moves = Moves(files, str(worker), self._pipe)
        self._lock = worker_lock(root, worker)
        self._claims: dict[int, Claim] = {}
        self._look_at = 0.0  # when to look at the directory although the pipe is not empty (monotonic seconds)
        self._counted, self._counted_until = 0, 0.0
        self._server: dict[str, object] = {}

    @classmethod
    def open(
        cls,
        root: Path | str,
        number: int | None,
        device: str,
        *,
        durable: bool = False,
        files: Files | None = None,
    ) -> Self:
        """Become the worker of this number, or the first that is free for None.

        `QueueError` names the process that has the number already.

        device: what it computes on, e.g. `cuda:1`; for people to read. May be called before there is a
        server.
        durable: every result is on the disk before its claim is dropped: a power cut costs no generated group.
        """
        root = Path(root)
        prepare_root(root)
        files = files or OsFiles(root)
        candidates = [WorkerId(n) for n in ([number] if number is not None else range(1, 1000))]
        for worker in candidates:
            queue = cls(root, worker, files, durable=durable)
            entered = False
            try:
                entered = queue._enter(device, patient=number is not None)
            finally:
                if not entered:
                    queue._pipe.close()
                    queue._lock.release()
            if entered:
                return queue
        taken = candidates[0]
        holder = describe_holder(worker_lock(root, taken).holder())
        raise QueueError(f"Worker {taken} runs already: {holder}. Give this one another number, or stop that one.")

    def _enter(self, device: str, *, patient: bool) -> bool:
        """Take the lock, then make pending what an earlier worker of this number left.

        False if it is alive.
        """
        deadline = time.monotonic() + (_TAKEOVER_S if patient else 0)
        while not self._lock.try_acquire({"torch_device": device}):
            if "torch_device" in (self._lock.holder() or {}) or time.monotonic() >= deadline:
                return False
            time.sleep(0.002)  # the server is making our predecessor's jobs pending
        self._learn_server()
        reason = f"Worker {self.name} died while it had this job."
        self._moves.release_claims(self.id, self._max_attempts, counts=self.server_alive(), reason=reason)
        return True

    @property
    def name(self) -> str:
        return str(self.id)

    def close(self) -> None:
        """Hand back what this worker still has, and free its number."""
        try:
            for claim in list(self._claims.values()):
                self.hand_back(claim)
        finally:
            self._pipe.close()
            self._lock.release()
            self._moves.files.close()

    def claim(self, limit: int, skip: Collection[int] = ()) -> list[Claim]:
        """Up to `limit` of the oldest pending jobs, without waiting. A job that failed before comes alone.

        skip: sequence numbers to leave to others, e.g. jobs that this worker handed back.

        `DiskFullError` if the oldest file is unusable and there is no room to say so: nothing was claimed.
        """
        self._lock.require()
        looked = time.monotonic() >= self._look_at
        jobs = self._look(skip) if looked else deque[str]()
        claims: list[Claim] = []
        try:
            while len(claims) < limit:
                if not jobs and not looked:
                    jobs = self._told(limit - len(claims), skip)
                    if not jobs and not claims:
                        jobs, looked = self._look(skip), True
                if not jobs:
                    break
                name = parse_name(jobs[0] + PENDING_END)
                if claims and name and name.attempt:
                    break
                jobs.popleft()
                claim = self._claim(name) if name else None
                if claim is not None:
                    claims.append(claim)
                    self._claims[claim.job.seq] = claim
                    if claim.attempt:
                        break
        except DiskFullError:
            if not claims:
                raise
        finally:
            self._pipe.announce(jobs)
        return claims

    def complete(self, claim: Claim, group: RolloutGroup) -> None:
        """Publish the result, then drop the claim. `DiskFullError`.

        The claim is kept, call again when there is room.
        """
        self._lock.require_process()
        if (group.job.seq, group.attempt, group.worker) != (claim.job.seq, claim.attempt, self.name):
            raise QueueError(f"The group of job {group.job.seq} is not an answer to claim {claim.name}.")
        result = f"queue/{claim.name.becomes(COMPLETE, self.id)}"
        self._moves.publish(encode_group(group), result, durable=self._durable)
        self._moves.drop(f"queue/{claim.name}")
        self._claims.pop(claim.job.seq, None)

    def fail(self, claim: Claim, error_text: str) -> None:
        """The job could not be done: pending again with the next attempt, or given up with `error_text`
        beside it.

        `DiskFullError` if the text finds no room: the claim is kept, call again.
        """
        self._lock.require_process()
        self._moves.try_again(claim.name, self._max_attempts, f"{claim.name}: {error_text}\n")
        self._claims.pop(claim.job.seq, None)

    def hand_back(self, claim: Claim) -> None:
        """Pending again with the same attempt: this worker stops, or cannot serve the job now."""
        self._lock.require_process()
        self._moves.move(f"queue/{claim.name}", f"queue/{claim.name.pending(claim.attempt)}")
        self._claims.pop(claim.job.seq, None)

    def wait(self, timeout_s: float, skip: Collection[int] = ()) -> bool:
        """Sleep until there may be a job that is not in `skip`; False when the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            if jobs := self._look(skip):
                self._pipe.announce(jobs)
                return True
            if time.monotonic() >= deadline:
                return False
            if self._pipe.wait(sleep_until(deadline, LOOK_S)):
                return True

    def pending(self) -> int:
        """Jobs that want a worker."""
        return counts_of(self._moves.files).pending

    def alive_workers(self) -> int:
        """Workers that are alive, this one included; may be a second old, as every look opens each one's lock."""
        if time.monotonic() >= self._counted_until:
            self._counted = len(live_workers(self.root))
            self._counted_until = time.monotonic() + _COUNT_S
        return self._counted

    def server_alive(self) -> bool:
        return server_lock(self.root).is_held()

    @property
    def _max_attempts(self) -> int:
        told = self._server.get("max_attempts")
        return told if isinstance(told, int) else DEFAULT_MAX_ATTEMPTS

    def _learn_server(self) -> None:
        """The server's lock file says which run it serves and how often a job may be tried."""
        self._server = dict(server_lock(self.root).last_owner())

    def _told(self, limit: int, skip: Collection[int]) -> deque[str]:
        """Up to `limit` jobs of the pipe, those that were announced first."""
        return _oldest_first(self._pipe.take(limit), skip)

    def _look(self, skip: Collection[int]) -> deque[str]:
        """Every pending job, the oldest first. None is in the pipe any more: announce those that others may have."""
        self._pipe.take(EVERYTHING)  # before the look, so that nothing falls between the two
        self._look_at = time.monotonic() + _BELIEVE_S
        entries = [entry for entry in self._moves.files.names("queue") if entry.endswith(PENDING_END)]
        return _oldest_first([entry.removesuffix(PENDING_END) for entry in entries if parse_name(entry)], skip)

    def _claim(self, name: JobName) -> Claim | None:
        """One rename.

        None if another worker was faster, or the file is unusable (set aside for the server to see).
        """
        mine = name.becomes(PROCESSING, self.id)
        if not self._moves.move(f"queue/{name}", f"queue/{mine}"):
            return None
        try:
            job = decode_job(self._moves.files.read(f"queue/{mine}"), expect_seq=name.seq)
            if job.run_id != self._server.get("run_id"):
                self._learn_server()
            if job.run_id != self._server.get("run_id"):
                raise BadFileError(f"it is a job of run {job.run_id!r}, this is run {self._server.get('run_id')!r}")
        except FileNotFoundError:
            return None
        except BadFileError as error:
            try:
                self._moves.set_aside(mine, BROKEN, f"{name}: {error}\n")
            except DiskFullError:
                self._moves.move(f"queue/{mine}", f"queue/{name}")
                raise
            return None
        return Claim(job, name.attempt, mine)


def _oldest_first(jobs: list[str], skip: Collection[int]) -> deque[str]:
    if skip:
        jobs = [job for job in jobs if (name := parse_name(job + PENDING_END)) and name.seq not in skip]
    return deque(sorted(jobs))
