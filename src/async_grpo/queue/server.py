"""The parameter server's side of the queue. The protocol is told in `job_queue`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Container
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from async_grpo.errors import BadFileError, QueueError, RunDirError
from async_grpo.queue.codec import decode_group, encode_job
from async_grpo.queue.filesystem import Files, OsFiles, prepare_root
from async_grpo.queue.listing import QueueCounts, counts_of, done_folders
from async_grpo.queue.liveness import (
    LOOK_S,
    Reaper,
    WorkerState,
    live_workers,
    recover_dead,
    server_lock,
    worker_lock,
)
from async_grpo.queue.names import (
    BROKEN,
    COMPLETE,
    DUPLICATE,
    FAILED,
    PENDING,
    PROCESSING,
    RETRIED,
    JobName,
    parse_name,
    parse_set_aside,
    reason_name,
    set_aside_name,
)
from async_grpo.queue.transitions import DEFAULT_MAX_ATTEMPTS, Moves, reason_of
from async_grpo.queue.wakeups import IN_MOVED_TO, DirectoryWatch, JobPipe, sleep_until
from async_grpo.records import Job, Purpose, RolloutGroup
from async_grpo.rundir.locks import describe_holder

MAX_OPEN = 256  # more files than one read of a directory returns, and a listing may miss one
_LOOKS_BEFORE_MISSING = 3


@dataclass(slots=True)
class Healing:
    """What should not have happened and was mended. All zero in a run whose files nobody damaged."""

    broken: int = 0  # unusable files; their jobs were issued again
    missing: int = 0  # jobs whose file vanished, issued again
    duplicates: int = 0  # second results, archived
    unknown: int = 0  # results of jobs that were never issued


class GivenUp(NamedTuple):
    """A job that failed as often as it may."""

    job: Job
    attempt: int  # of the last try
    reason: str  # e.g. the traceback


class ServerQueue:
    """The parameter server's side.

    Methods are for one thread, except `recover_dead`, `workers` and `counts`.
    """

    def __init__(self, root: Path, run_id: str, max_attempts: int, max_open: int, files: Files) -> None:
        self.root, self.run_id = root, run_id
        self.healing = Healing()
        self.given_up: dict[int, GivenUp] = {}  # in the order in which it was noticed
        self._max_attempts, self._max_open = max_attempts, max_open
        self._pipe = JobPipe(root)
        self._moves = Moves(files, "server", self._pipe)
        self._lock = server_lock(root)
        self._open: dict[int, Job] = {}
        self._attempts: dict[int, int] = {}  # highest attempt that this server issued of an open job
        self._looks: dict[int, int] = {}  # looks at the directory that did not show an open job
        self._left: dict[int, str] = {}  # files of an earlier server, for `submit` to adopt
        self._next_attempt: dict[int, int] = {}  # of jobs of which an earlier server knew more tries
        self._highest = -1
        self._seen: set[JobName] = set()  # finished groups that `finished` returned
        self._watch = DirectoryWatch({root / name: IN_MOVED_TO for name in ("queue", "quarantine")})
        self._death = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reaper: Reaper | None = None

    @classmethod
    def open(
        cls,
        root: Path | str,
        run_id: str,
        *,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        max_open: int = MAX_OPEN,
        consumed: Container[int] = frozenset(),
        watch_workers: bool = True,
        files: Files | None = None,
    ) -> Self:
        """Become the one server of the queue in `root`; `RunDirError` names the one that is there already.

        consumed: sequence numbers that the checkpoint which this run continues from has used or given up.
        Submit all
            others again: what an earlier server left of them is adopted, generated groups are given back.
        watch_workers: recover the jobs of a dead worker in a thread, within milliseconds. Without it call
            `recover_dead` yourself.
        """
        root = Path(root)
        prepare_root(root)
        queue = cls(root, run_id, max_attempts, max_open, files or OsFiles(root))
        if not queue._lock.try_acquire({"run_id": run_id, "max_attempts": max_attempts}):
            raise RunDirError(
                f"The queue in {root} has a server: {describe_holder(queue._lock.holder())}. "
                "One run directory has one parameter server; stop that one or choose another --run-dir."
            )
        try:
            queue._inherit(consumed)
            if watch_workers:
                queue._reaper = Reaper(root, queue.recover_dead, lambda: os.eventfd_write(queue._death, 1))
        except BaseException:
            queue.close()
            raise
        return queue

    def close(self) -> None:
        """Stop being the server. The files stay as they are, workers go on with what they have."""
        if self._death < 0:
            return
        if self._reaper is not None:
            self._reaper.close()
        self._watch.close()
        os.close(self._death)
        self._death = -1
        self._lock.release()
        self._pipe.close()
        self._moves.files.close()

    def submit(self, job: Job) -> None:
        """Issue a job, or adopt what an earlier server left of it: a claim, a result, a group in done/.

        `DiskFullError` if there is no room: the job was not issued, submit it again.
        """
        if job.run_id != self.run_id or job.seq in self._open:
            raise QueueError(
                f"Job {job.seq} of run {job.run_id} is open already, or of another run than {self.run_id}."
            )
        if len(self._open) >= self._max_open:
            raise QueueError(f"{self._max_open} jobs are open, which is the bound: take finished groups first.")
        attempt = self._next_attempt.pop(job.seq, 0)
        if not self._adopt(job.seq):
            self._moves.publish(encode_job(job), f"queue/{JobName(job.seq, attempt, PENDING)}")
        self._open[job.seq], self._attempts[job.seq] = job, attempt
        self._highest = max(self._highest, job.seq)

    def finished(self, purpose: Purpose = "train") -> list[JobName]:
        """Finished groups of open jobs for this purpose, oldest first, one a job.

        Jobs whose files are broken or missing are issued again.
        """
        if self._reaper is not None:
            self._reaper.raise_error()
        names = self._moves.listing()
        visible = {name.seq for name in names}
        for seq in [seq for seq in self._open if seq not in visible]:
            self._look_for(seq)
        for seq in self._looks.keys() & visible:
            del self._looks[seq]
        results: dict[int, JobName] = {}
        for name in sorted(name for name in names if name.state == COMPLETE):
            if name.seq in self._open or name.seq in self.given_up:
                results.setdefault(name.seq, name)
            elif name.seq not in self._left:
                self._refuse(name)
        self._seen = set(results.values())
        return [name for seq, name in results.items() if self._job_of(seq).purpose == purpose]

    def take(self, entry: JobName) -> RolloutGroup | None:
        """Check and archive a finished group, and close its job; later results of the job are archived unused.

        None if the file was unusable (set aside; its job is issued again) or a duplicate.
        """
        if entry.seq not in self._open and entry.seq not in self.given_up:
            self._refuse(entry)
            return None
        try:
            group = self._read_group(entry, self._job_of(entry.seq))
        except FileNotFoundError:
            return None
        except BadFileError as error:
            self._moves.set_aside(entry, BROKEN, f"{entry}: {error}\n")
            if entry.seq in self._open:  # nobody waits for what is given up
                self._look_for(entry.seq)
            return None
        if not self._moves.archive(entry):
            return None
        self._close_job(entry.seq)
        self.given_up.pop(entry.seq, None)
        return group

    def recover_dead(self) -> list[int]:
        """Make the jobs of dead workers pending again; returns their sequence numbers. Safe in any thread."""
        return recover_dead(self.root, self._moves, self._max_attempts)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a group is finished, a file is set aside, or a worker dies.

        False when the time is over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            woken = self._watch.wait(sleep_until(deadline, LOOK_S), also=[self._death])
            if woken.ready:
                os.eventfd_read(self._death)
                return True
            if any("_complete_from_" in name or "_failed" in name or "_broken" in name for name in woken.names):
                return True
            if (woken.look or not woken.names) and self._something_new():
                return True
            if time.monotonic() >= deadline:
                return False

    @property
    def open_jobs(self) -> int:
        """Jobs issued, and neither taken nor given up."""
        return len(self._open)

    def unclaimed(self) -> list[int]:
        """Open jobs that no worker had at the moment of this look, oldest first."""
        pending = {name.seq for name in self._moves.listing() if name.state == PENDING}
        return sorted(pending & self._open.keys())

    def counts(self) -> QueueCounts:
        return counts_of(self._moves.files)

    def claimants(self) -> list[str]:
        """Names of the workers that have a job now, dead ones included until their jobs are pending again."""
        return [str(worker) for worker in self._moves.claimants()]

    def workers(self) -> list[WorkerState]:
        return live_workers(self.root)

    def trim_done(self, keep: int, consumed: Container[int]) -> int:
        """Delete the oldest archived groups but `keep`; returns how many.

        Only groups that are in `consumed`, the set that the last durable checkpoint carries: the others would
        be given back on resume.
        """
        files = self._moves.files
        folders = [(folder, sorted(files.names(folder))) for folder in done_folders(files)]
        excess = sum(len(entries) for _, entries in folders) - keep
        removed = 0
        for folder, entries in folders:
            for entry in entries:
                name = parse_name(entry)
                if removed >= excess:
                    return removed
                if name is not None and (name.state == DUPLICATE or name.seq in consumed):
                    self._moves.drop(f"{folder}/{entry}")
                    removed += 1
        return removed

    def _inherit(self, consumed: Container[int]) -> None:
        """Sort what an earlier server left: what is consumed goes to done/, the rest waits for `submit`."""
        moves = self._moves
        moves.clear_temporaries("server")
        for folder in done_folders(moves.files):
            for name in filter(None, map(parse_name, moves.files.names(folder))):
                self._highest = max(self._highest, name.seq)
                if name.state == COMPLETE and name.seq not in consumed:
                    self._left[name.seq] = f"{folder}/{name}"
        for aside in filter(None, map(parse_set_aside, moves.files.names("quarantine"))):
            self._highest = max(self._highest, aside.seq)
            if aside.seq not in consumed:  # resuming is one more try
                self._next_attempt[aside.seq] = max(self._next_attempt.get(aside.seq, 0), aside.attempt + 1)
                if aside.kind == FAILED:  # it is open again: nobody shall take it for given up
                    retried = set_aside_name(JobName(aside.seq, aside.attempt, PENDING), RETRIED)
                    moves.move(f"quarantine/{reason_name(aside.name)}", f"quarantine/{reason_name(retried)}")
                    moves.move(f"quarantine/{aside.name}", f"quarantine/{retried}")
        for worker in moves.claimants():
            lock = worker_lock(self.root, worker)
            if lock.try_acquire():  # while the run was down, the death of a worker is no attempt
                try:
                    moves.release_claims(worker, self._max_attempts, counts=False, reason="")
                finally:
                    lock.release()
        for name in sorted(moves.listing()):
            self._highest = max(self._highest, name.seq)
            if name.seq in consumed:
                self._inherit_consumed(name)
            elif name.state == PENDING and moves.drop(
                f"queue/{name}"
            ):  # `submit` writes it anew, with today's versions
                self._next_attempt[name.seq] = max(self._next_attempt.get(name.seq, 0), name.attempt)
            elif name.state == COMPLETE or name.seq not in self._left:
                self._left[name.seq] = f"queue/{name}"

    def _inherit_consumed(self, name: JobName) -> None:
        if name.state == COMPLETE:
            self._moves.archive(name)
        elif name.state == PENDING:  # given up, and tried once more by hand: nobody waits for it any more
            self._moves.set_aside(name, FAILED, f"{name}: the run was restarted before its next try.\n")

    def _adopt(self, seq: int) -> bool:
        """Make the file that an earlier server left of this job the one of this server."""
        left = self._left.pop(seq, None)
        if left is None:
            return False
        if left.startswith("done/"):
            return self._moves.move(left, f"queue/{left.rpartition('/')[2]}")
        return True  # a claim or a result: if it is gone by now, it went on to another state

    def _job_of(self, seq: int) -> Job:
        """An open job, or one that was given up, of which a late result may still arrive."""
        return self._open[seq] if seq in self._open else self.given_up[seq].job

    def _read_group(self, entry: JobName, job: Job) -> RolloutGroup:
        group = decode_group(
            self._moves.files.read(f"queue/{entry}"),
            expect_seq=entry.seq,
            expect_run=self.run_id,
            expect_attempt=entry.attempt,
            expect_worker=str(entry.worker),
        )
        if not _asks_the_same(group.job, job):
            raise BadFileError("it answers another job than the one that was issued, e.g. another prompt or seed")
        return group

    def _refuse(self, name: JobName) -> None:
        """A result that no open job waits for: a second one, or one of a job that was never issued."""
        if name.seq > self._highest:
            self.healing.unknown += 1
            self._moves.set_aside(name, BROKEN, f"{name}: no job {name.seq} was issued by run {self.run_id}.\n")
        elif self._moves.archive(name, DUPLICATE):
            self.healing.duplicates += 1

    def _look_for(self, seq: int) -> None:
        """Find out why an open job is in no state that `finished` saw: given up, unusable, or really gone."""
        entries = map(parse_set_aside, self._moves.files.names("quarantine"))
        aside = [entry for entry in entries if entry and entry.seq == seq and entry.attempt >= self._attempts[seq]]
        last = max(aside, key=lambda entry: (entry.attempt, entry.kind == FAILED), default=None)
        if last is not None and last.kind == FAILED:
            self._give_up(seq, last.attempt, reason_of(self._moves.files, last.name))
        elif last is not None:
            self._issue_again(seq, last.attempt + 1, reason_of(self._moves.files, last.name))
            self.healing.broken += 1
        else:
            self._looks[seq] = self._looks.get(seq, 0) + 1
            if self._looks[seq] >= _LOOKS_BEFORE_MISSING and not self._exists_anywhere(seq):
                self._issue_again(seq, self._attempts[seq] + 1, None)
                self.healing.missing += 1

    def _issue_again(self, seq: int, attempt: int, broken: str | None) -> None:
        """Publish an open job once more. A job whose files are `broken` time and again is given up."""
        data = encode_job(self._open[seq])
        if broken is not None and attempt >= self._max_attempts:
            name = set_aside_name(JobName(seq, attempt - 1, PENDING), FAILED)
            self._moves.publish(broken.encode(), f"quarantine/{reason_name(name)}")
            self._moves.publish(data, f"quarantine/{name}")
            self._give_up(seq, attempt - 1, broken)
            return
        self._moves.publish(data, f"queue/{JobName(seq, attempt, PENDING)}")
        self._attempts[seq] = attempt
        self._looks.pop(seq, None)

    def _give_up(self, seq: int, attempt: int, reason: str) -> None:
        self.given_up[seq] = GivenUp(self._open[seq], attempt, reason)
        self._close_job(seq)

    def _close_job(self, seq: int) -> None:
        for book in (self._open, self._attempts, self._looks):
            book.pop(seq, None)

    def _exists_anywhere(self, seq: int) -> bool:
        """By direct looks at every name that the job can have.

        Twice, because it may move from one to another meanwhile.
        """
        workers = [worker.id for worker in self.workers()]
        attempts = range(self._attempts[seq], self._attempts[seq] + self._max_attempts + 1)
        names = [JobName(seq, attempt, PENDING) for attempt in attempts]
        for state in (PROCESSING, COMPLETE):
            names += [JobName(seq, attempt, state, worker) for attempt in attempts for worker in workers]
        failed = [f"quarantine/{set_aside_name(JobName(seq, attempt, PENDING), FAILED)}" for attempt in attempts]
        paths = [f"queue/{name}" for name in names] + failed
        return any(map(self._moves.files.exists, paths * 2))

    def _something_new(self) -> bool:
        """For a look without an event: is there a finished group that `finished` did not return yet?"""
        names = [name for name in self._moves.listing() if name.state == COMPLETE]
        return any(name.seq in self._open and name not in self._seen for name in names)


def _asks_the_same(made: Job, issued: Job) -> bool:
    """Whether two jobs agree in all but their versions, which a resumed run sets anew."""
    made = replace(made, born_version=issued.born_version, min_version=issued.min_version)
    return made == issued or json.dumps(asdict(made)) == json.dumps(asdict(issued))  # NaN does not equal NaN
