"""A worker's side of the queue. `async_grpo.queue` describes the protocol."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from async_grpo.errors import BadFileError, DiskFullError, QueueError
from async_grpo.queue.codec import decode_job, encode_group
from async_grpo.queue.filesystem import Files, OsFiles, job_files, prepare_root
from async_grpo.queue.liveness import LOOK_S, live_workers, worker_lock
from async_grpo.queue.names import BROKEN, COMPLETE, PENDING, PENDING_END, PROCESSING, JobName, parse_name
from async_grpo.queue.transitions import DEFAULT_MAX_ATTEMPTS, Moves
from async_grpo.queue.wakeups import EVERYTHING, JobPipe, sleep_until
from async_grpo.records import Job, RolloutGroup, WorkerId
from async_grpo.rundir.locks import KernelLock, describe_holder, server_lock

_PIPE_TRUST_S = 0.05  # for this long only the pipe is read: an older job that is missing in it must not wait longer
_COUNT_S = 1.0
_TAKEOVER_S = 5.0  # how long a starting worker waits while the server releases its predecessor's jobs


class Claim(NamedTuple):
    """A job that this worker has, until it completes, fails or hands it back."""

    job: Job
    attempt: int
    name: JobName


class WorkerQueue:
    """One worker process' side, for one thread.

    The worker's lock lasts as long as the process. A forked child has no part in it. If the worker dies, its claims are
    other workers' again.
    """

    def __init__(self, root: Path, worker: WorkerId, lock: KernelLock, files: Files, *, durable: bool) -> None:
        self.root, self.id, self.name = root, worker, str(worker)
        self._durable = durable
        self._pipe = JobPipe(root)
        self._moves = Moves(files, self.name, self._pipe)
        self._lock, self._server_lock = lock, server_lock(root)
        self._claims: dict[int, Claim] = {}
        self._look_at = 0.0  # when to look at the directory although the pipe is not empty (monotonic seconds)
        self._counted, self._counted_until = 0, 0.0
        self._served_run: str | None = None  # of the server that was heard of last
        self._max_attempts = DEFAULT_MAX_ATTEMPTS  # as that server says

    @classmethod
    def open(
        cls,
        root: Path | str,
        number: int | None,
        device: str,
        *,
        durable: bool = False,
        files: Files | None = None,
        far_workers: int = 0,
    ) -> Self:
        """Become the worker of this number, or the first that is free for None.

        `QueueError` names the process that has the number already.

        device: what it computes on, e.g. `cuda:1`; for people to read. May be called before there is a server.
        far_workers: it claims for so many workers of another machine: they count as such where jobs are shared out,
            and the end of this process is no attempt at their jobs.
        durable: every result is on the disk before its claim is dropped: a power cut costs no generated group.
        """
        root = Path(root)
        note: dict[str, Any] = {"torch_device": device}
        if far_workers:
            note |= {"workers": far_workers, "far": True}
        if number is not None and WorkerId.parse(str(WorkerId(number))) is None:
            raise QueueError(f"The number of a worker must be from 0 to 9999, got {number}.")
        prepare_root(root)
        candidates = [WorkerId(n) for n in ([number] if number is not None else range(1, 1000))]
        for worker in candidates:
            lock = worker_lock(root, worker)
            if _take(lock, note, patience_s=0 if number is None else _TAKEOVER_S):
                break
        else:
            holder = describe_holder(worker_lock(root, candidates[0]).holder())
            raise QueueError(
                f"Worker {candidates[0]} runs already: {holder}. Give this one another number, or stop that one."
            )
        with ExitStack() as undo:
            undo.callback(lock.release)
            queue = cls(root, worker, lock, files or OsFiles(root), durable=durable)
            undo.callback(queue._pipe.close)
            queue._tidy_up(counts=not far_workers)
            undo.pop_all()
        return queue

    def _tidy_up(self, *, counts: bool) -> None:
        """Make pending what an earlier worker of this number left."""
        self._learn_server()
        self._moves.release_claims(self.name, self._max_attempts, counts=counts and self.served())

    def close(self) -> None:
        """Hand back what this worker still has, and free its number."""
        try:
            self.hand_back_all()
        finally:
            self._pipe.close()
            self._lock.release()
            self._moves.files.close()

    def claim(self, limit: int, skip: Container[int] = ()) -> list[Claim]:
        """Up to `limit` of the oldest pending jobs, without waiting. A job that failed before comes alone.

        skip: sequence numbers to leave to others, e.g. jobs that this worker handed back.

        `DiskFullError` if the oldest file is unusable and there is no room to say so; then nothing was claimed.
        """
        self._lock.require()
        claims: list[Claim] = []
        if time.monotonic() < self._look_at:
            claims = self._claim_among(_oldest_first(self._pipe.take(limit), skip), limit)
        return claims or self._claim_among(self._look(skip), limit)

    def complete(self, claim: Claim, group: RolloutGroup) -> None:
        """Hand over the result. `DiskFullError`: the claim is kept, call again.

        `BadGroupError` or `UnsupportedError`: the group holds what cannot be handed over; the claim is kept.
        """
        self._lock.require_process()
        if (group.job.seq, group.attempt, group.worker) != (claim.job.seq, claim.attempt, self.name):
            raise QueueError(f"The group of job {group.job.seq} is not an answer to claim {claim.name}.")
        result = claim.name._replace(state=COMPLETE)
        self._moves.publish(encode_group(group), f"queue/{result}", durable=self._durable)
        self._moves.drop(f"queue/{claim.name}")
        self._claims.pop(claim.job.seq, None)

    def fail(self, claim: Claim, error_text: str) -> None:
        """The job could not be done: pending again with the next attempt, or given up. Errors are as for `complete`."""
        self._lock.require_process()
        self._moves.try_again(claim.name, self._max_attempts, f"{claim.name}: {error_text}\n")
        self._claims.pop(claim.job.seq, None)

    def hand_back(self, claim: Claim) -> None:
        """Pending again with the same attempt: this worker stops, or cannot serve the job now."""
        self._lock.require_process()
        self._moves.move(f"queue/{claim.name}", f"queue/{claim.name.pending(claim.attempt)}")
        self._claims.pop(claim.job.seq, None)

    def hand_back_all(self) -> None:
        for claim in list(self._claims.values()):
            self.hand_back(claim)

    def wait(self, timeout_s: float, skip: Container[int] = ()) -> bool:
        """Sleep until there may be a job that is not in `skip`; False when the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            if names := self._look(skip):
                self._pipe.announce(name.job for name in names)
                return True
            if time.monotonic() >= deadline:
                return False
            if self._pipe.wait(sleep_until(deadline, LOOK_S)):
                return True

    def pending(self) -> int:
        return sum(name.state == PENDING for name in job_files(self._moves.files))

    def alive_workers(self) -> int:
        """Workers that are alive, this one included; may be a second old."""
        if time.monotonic() >= self._counted_until:
            self._counted = sum(worker.workers for worker in live_workers(self.root))
            self._counted_until = time.monotonic() + _COUNT_S
        return self._counted

    def served(self) -> bool:
        """Whether a live server issues jobs. One that is still loading does not yet."""
        return "run_id" in (self._server_lock.holder() or {})

    def _learn_server(self) -> None:
        """The server's note says which run it serves and how often a job may be tried.

        A server that issues no jobs yet has not said so, and one that writes the note now has not finished: what was
        said before is still good, as it is where the note holds anything else.
        """
        note = self._server_lock.last_owner()
        run_id, attempts = note.get("run_id"), note.get("max_attempts", DEFAULT_MAX_ATTEMPTS)
        if type(run_id) is str and type(attempts) is int and attempts > 0:
            self._served_run, self._max_attempts = run_id, attempts

    def _look(self, skip: Container[int]) -> list[JobName]:
        """Every pending job, the oldest first. Announce those that are left to others: none is in the pipe any more."""
        self._pipe.take(EVERYTHING)  # before the look, so that nothing falls between the two
        self._look_at = time.monotonic() + _PIPE_TRUST_S
        entries = self._moves.files.names("queue")
        return _oldest_first((entry[: -len(PENDING_END)] for entry in entries if entry.endswith(PENDING_END)), skip)

    def _claim_among(self, names: list[JobName], limit: int) -> list[Claim]:
        """Claim up to `limit` of these jobs in their order, and leave the others to the workers that it wakes."""
        claims: list[Claim] = []
        for index, name in enumerate(names):
            alone = bool(claims) and max(name.attempt, claims[-1].attempt) > 0
            if len(claims) == limit or alone:
                self._pipe.announce(name.job for name in names[index:])
                break
            try:
                claim = self._try_claim(name)
            except DiskFullError:
                if not claims:
                    raise
                break
            if claim is not None:
                claims.append(claim)
                self._claims[claim.job.seq] = claim
        return claims

    def _try_claim(self, name: JobName) -> Claim | None:
        """One rename.

        None if another worker was faster, or the file is unusable (set aside for the server to see).
        """
        mine = name._replace(state=PROCESSING, worker=self.name)
        if not self._moves.move(f"queue/{name}", f"queue/{mine}"):
            return None
        try:
            job = decode_job(self._moves.files.read(f"queue/{mine}"), name)
            if job.run_id != self._served_run:
                self._learn_server()
            run = self._served_run or job.run_id  # unknown after a full disk; the server checks the result
            if job.run_id != run:
                raise BadFileError(f"it is a job of run {job.run_id!r}, this is run {run!r}")
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


def _take(lock: KernelLock, note: dict[str, Any], patience_s: float) -> bool:
    """Take a worker's lock; False if that worker is alive."""
    deadline = time.monotonic() + patience_s
    while not lock.try_acquire(note):
        if "torch_device" in (lock.holder() or {}) or time.monotonic() >= deadline:
            return False
        time.sleep(0.002)  # the server is making our predecessor's jobs pending
    return True


def _oldest_first(jobs: Iterable[str], skip: Container[int]) -> list[JobName]:
    names = (parse_name(job + PENDING_END) for job in jobs)
    return sorted(name for name in names if name is not None and name.seq not in skip)
