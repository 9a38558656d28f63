"""The parameter server's side of the queue. `async_grpo.queue` describes the protocol."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from async_grpo.errors import BadFileError, DiskFullError, QueueError, RunDirError
from async_grpo.queue.codec import encode_job
from async_grpo.queue.filesystem import Files, OsFiles, job_files, prepare_root, set_aside_files
from async_grpo.queue.listing import QueueCounts, counts_of, why_set_aside
from async_grpo.queue.liveness import LOOK_S, Reaper, WorkerState, live_workers
from async_grpo.queue.names import (
    BROKEN,
    COMPLETE,
    DUPLICATE,
    FAILED,
    NOT_TRAINED_ON,
    PENDING,
    JobName,
    reason_name,
    set_aside_name,
)
from async_grpo.queue.recovery import Inheritance, recover_dead
from async_grpo.queue.results import asks_the_same, read_result
from async_grpo.queue.transitions import DEFAULT_MAX_ATTEMPTS, Done, Moves
from async_grpo.queue.wakeups import IN_MOVED_TO, DirectoryWatch, JobPipe, sleep_until
from async_grpo.records import Job, Purpose, RolloutGroup
from async_grpo.rundir.locks import KernelLock, describe_holder, server_lock
from async_grpo.rundir.refusal import raise_refusal

# A listing of so many files takes milliseconds. It may miss one that is renamed meanwhile: a job counts as missing
# after several listings in a row, and after a look for its own names.
MAX_OPEN = 4096
FOR_EVALUATIONS = 128  # of them
_LOOKS_BEFORE_MISSING = 3  # a look may miss a file that is renamed meanwhile, and a job has two renames


@dataclass(slots=True)
class Healing:
    """What should not have happened and was repaired. All zero in a run whose files nobody damaged."""

    broken: int = 0  # unusable files; their jobs were issued again
    missing: int = 0  # jobs whose file vanished, issued again
    duplicates: int = 0  # second results, archived
    unknown: int = 0  # results of jobs that were never issued


@dataclass(slots=True)
class OpenJob:
    """A job that is issued, and neither taken nor given up."""

    job: Job
    attempt: int  # the highest that this server issued
    missed_looks: int = 0  # looks at the directory in a row that did not show it


class GivenUp(NamedTuple):
    """A job that failed as often as it may."""

    job: Job
    attempt: int  # of the last try
    reason: str  # e.g. the traceback


class ServerQueue:
    """The parameter server's side: every job that was submitted is taken, once, or ends in `given_up`.

    Methods are for one thread, except `recover_dead`, `workers` and `counts`.
    """

    def __init__(
        self,
        root: Path,
        run_id: str,
        max_attempts: int,
        max_open: int,
        files: Files,
        lock: KernelLock,
        refuse: Callable[[RolloutGroup], None] | None = None,
    ) -> None:
        self.root, self.run_id = root, run_id
        self.healing = Healing()
        self.given_up: dict[int, GivenUp] = {}  # in the order in which it was noticed
        self._max_attempts, self._max_open, self._refuse_group = max_attempts, max_open, refuse
        self._pipe = JobPipe(root)
        self._moves = Moves(files, "server", self._pipe)
        self._lock = lock
        self._lock_is_ours = not lock.held_here
        self._serves = False  # whether the lock's note says so
        self._open: dict[int, OpenJob] = {}
        self._highest = -1
        self._next_evaluation = NOT_TRAINED_ON  # sequence number
        self._done: Done  # both from the moment that the lock is held
        self._left: Inheritance
        self._largest_group = 0  # bytes, of those taken; at first of the newest in done/
        self._seen: set[JobName] = set()  # results of open jobs that `finished` saw
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
        lock: KernelLock | None = None,
        refuse: Callable[[RolloutGroup], None] | None = None,
    ) -> Self:
        """Become the one server of the queue in `root`; `RunDirError` names the one that is there already.

        consumed: sequence numbers that the checkpoint which this run continues from has used or given up. Submit all
            others again: what an earlier server left of them is adopted, generated groups are given back.
        watch_workers: recover the jobs of a dead worker in a thread, within milliseconds. Without it call
            `recover_dead` yourself.
        lock: the server's lock (`rundir.locks.server_lock`), if the caller holds it already and will release it.
        refuse: raises `BadFileError` for a group to train on that the caller cannot use; it counts as a broken file.
        """
        root = Path(root)
        prepare_root(root)
        queue = cls(root, run_id, max_attempts, max_open, files or OsFiles(root), lock or server_lock(root), refuse)
        if not queue._lock.try_acquire({"role": "parameter server"}):
            raise RunDirError(
                f"The queue in {root} has a server: {describe_holder(queue._lock.holder())}. "
                "One run directory has one parameter server; stop that one or choose another --run-dir."
            )
        try:
            queue._done = Done(queue._moves)
            queue._left = Inheritance(queue._moves, queue._done, consumed)
            queue._left.sort(root, max_attempts)
            queue._highest, queue._next_evaluation = queue._left.highest, queue._left.highest_not_trained_on + 1
            queue._largest_group = queue._done.newest_bytes(root)
            if watch_workers:
                queue._reaper = Reaper(root, queue.recover_dead, lambda: os.eventfd_write(queue._death, 1))
        except BaseException:
            queue.close()
            raise
        return queue

    def close(self) -> None:
        """Stop being the server. The files stay as they are, workers continue with what they have."""
        if self._death < 0:
            return
        if self._reaper is not None:
            self._reaper.close()
        self._watch.close()
        os.close(self._death)
        self._death = -1
        if self._lock_is_ours:
            self._lock.release()
        self._pipe.close()
        self._moves.files.close()

    def new_seq(self) -> int:
        """The next sequence number for a job that is not trained on; no job of this run directory ever had it."""
        self._next_evaluation += 1
        return self._next_evaluation - 1

    def submit(self, job: Job, *, attempt: int = 0) -> None:
        """Issue a job, or adopt what an earlier server left of it: a claim, a result, a group in done/.

        attempt: of this try, where the job was tried elsewhere before.

        `DiskFullError` if there is no room: the job was not issued, submit it again.
        """
        if job.run_id != self.run_id or job.seq in self._open:
            raise QueueError(
                f"Job {job.seq} of run {job.run_id} is open already, or of another run than {self.run_id}."
            )
        if len(self._open) >= self._max_open:
            raise QueueError(f"{self._max_open} jobs are open, which is the bound: take finished groups first.")
        self._lock.require()
        if not self._serves:  # the first job: from now on workers may claim
            self._lock.add_to_note(run_id=self.run_id, max_attempts=self._max_attempts)
            self._serves = True
        attempt = self._left.next_attempt.get(job.seq, attempt)
        if job.seq not in self._left.files or not self._left.adopt(job.seq):
            self._moves.publish(encode_job(job), f"queue/{JobName(job.seq, attempt, PENDING)}")
        self._open[job.seq] = OpenJob(job, attempt)
        if job.purpose == "train":
            self._highest = max(self._highest, job.seq)

    def finished(self, purpose: Purpose = "train") -> list[JobName]:
        """Finished groups of open jobs for this purpose, oldest first, one a job.

        Jobs whose files are broken or missing are issued again. `RunRefused`: a worker has ended the run by it.
        """
        self._lock.require()  # without the file a second server could start
        raise_refusal(self.root)
        if self._reaper is not None:
            self._reaper.raise_error()
        names = job_files(self._moves.files)
        visible = {name.seq for name in names}
        for seq, open_job in list(self._open.items()):
            if seq in visible:
                open_job.missed_looks = 0
            else:
                with suppress(DiskFullError):  # the next look tries again
                    self._look_for(seq)
        results: dict[int, JobName] = {}
        complete = sorted(name for name in names if name.state == COMPLETE)
        for name in complete:
            if name.seq in self._open or name.seq in self.given_up:
                results.setdefault(name.seq, name)
            elif name.seq not in self._left.files:
                with suppress(DiskFullError):
                    self._refuse(name)
        self._withdraw_forgotten(names)
        self._seen = {name for name in complete if name.seq in results}
        return [name for seq, name in results.items() if self._job_of(seq).purpose == purpose]

    def take(self, entry: JobName) -> RolloutGroup | None:
        """Check and archive a finished group, and close its job; later results of the job are archived unused.

        None if the file was unusable (set aside; its job is issued again) or a duplicate. `DiskFullError`: the file
        is still there, call again.
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
            if entry.seq in self._open:  # a job that was given up has no files to look for
                self._look_for(entry.seq)
            return None
        if not self._done.add(entry):
            return None
        self._open.pop(entry.seq, None)
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
        pending = {name.seq for name in job_files(self._moves.files) if name.state == PENDING}
        return sorted(pending & self._open.keys())

    def counts(self) -> QueueCounts:
        """How many jobs are in each state."""
        return counts_of(job_files(self._moves.files), set_aside_files(self._moves.files))

    def claimants(self) -> list[str]:
        """Names of the workers that have a job now, dead ones included until their jobs are pending again."""
        return self._moves.claimants()

    def workers(self) -> list[WorkerState]:
        """The workers that are alive."""
        return live_workers(self.root)

    def short_of_room(self) -> bool:
        """Whether the disk has no room for a group as large as the largest so far, so that workers wait."""
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize < self._largest_group

    def trim_done(self, keep: int, consumed: Container[int]) -> int:
        """Delete the oldest archived groups beyond `keep`; returns how many.

        Only groups that are in `consumed`, the set that the last durable checkpoint carries: the others would be given
        back on resume.
        """
        return self._done.trim(keep, consumed)

    def _job_of(self, seq: int) -> Job:
        """An open job, or one that was given up, of which a late result may still arrive."""
        return self._open[seq].job if seq in self._open else self.given_up[seq].job

    def _read_group(self, entry: JobName, job: Job) -> RolloutGroup:
        group = self._read(entry, self._open.get(entry.seq) or self.given_up[entry.seq])
        if not asks_the_same(group.job, job):
            raise BadFileError("it answers another job than the one that was issued, e.g. another prompt or seed")
        if self._refuse_group is not None and job.purpose == "train":
            self._refuse_group(group)
        return group

    def _read(self, entry: JobName, tried: OpenJob | GivenUp | JobName | None) -> RolloutGroup:
        data = self._moves.files.read(f"queue/{entry}")
        self._largest_group = max(self._largest_group, len(data))
        most = (tried.attempt if tried is not None else 0) + self._max_attempts
        return read_result(data, entry, self.run_id, most_attempt=most)

    def _refuse(self, name: JobName) -> None:
        """A result that no open job waits for: a second one, or no result of a job that was ever issued."""
        if name.trains and name.seq > self._highest:
            self.healing.unknown += 1
            self._moves.set_aside(name, BROKEN, f"{name}: no job {name.seq} was issued by run {self.run_id}.\n")
            return
        try:
            self._read(name, max((done for done in self._done.names if done.seq == name.seq), default=None))
        except FileNotFoundError:
            return
        except BadFileError as error:
            self._moves.set_aside(name, BROKEN, f"{name}: {error}\n")
            return
        if self._done.add(name, DUPLICATE):
            self.healing.duplicates += name.trains

    def _withdraw_forgotten(self, names: list[JobName]) -> None:
        """A dead server's evaluation, given back only now: it may ask for a version that is long in coming."""
        for name in names:
            known = name.seq in self._open or name.seq in self.given_up
            if name.state == PENDING and not name.trains and not known:
                with suppress(IsADirectoryError):  # a worker will set it aside
                    self._moves.drop(f"queue/{name}")

    def _look_for(self, seq: int) -> None:
        """Find out why an open job is in no state that `finished` saw: given up, unusable, or really gone."""
        open_job, files = self._open[seq], self._moves.files
        possible = range(open_job.attempt, open_job.attempt + self._max_attempts + 1)
        aside = [entry for entry in set_aside_files(files) if entry.seq == seq and entry.attempt in possible]
        last = max(aside, key=lambda entry: (entry.attempt, entry.kind == FAILED), default=None)
        if last is not None and last.kind == FAILED:
            self._give_up(seq, last.attempt, why_set_aside(files, last.name))
        elif last is not None:
            self._issue_again(seq, last.attempt + 1, why_set_aside(files, last.name))
            self.healing.broken += 1
        else:
            open_job.missed_looks += 1
            if open_job.missed_looks >= _LOOKS_BEFORE_MISSING:
                self._issue_again(seq, open_job.attempt + 1, None)
                self.healing.missing += 1

    def _issue_again(self, seq: int, attempt: int, broken: str | None) -> None:
        """Publish an open job once more. A job whose files are `broken` time and again is given up."""
        open_job = self._open[seq]
        data = encode_job(open_job.job)
        if broken is not None and attempt >= self._max_attempts:
            name = set_aside_name(JobName(seq, attempt - 1, PENDING), FAILED)
            self._moves.publish(broken.encode(), f"quarantine/{reason_name(name)}")
            self._moves.publish(data, f"quarantine/{name}")
            self._give_up(seq, attempt - 1, broken)
            return
        self._moves.publish(data, f"queue/{JobName(seq, attempt, PENDING)}")
        open_job.attempt, open_job.missed_looks = attempt, 0

    def _give_up(self, seq: int, attempt: int, reason: str) -> None:
        self.given_up[seq] = GivenUp(self._open.pop(seq).job, attempt, reason)

    def _something_new(self) -> bool:
        """For a look without an event: is there a result that `finished` did not see yet?"""
        names = [name for name in job_files(self._moves.files) if name.state == COMPLETE]
        return any(name.seq in self._open and name not in self._seen for name in names)
