"""The queue of prompt groups between one parameter server and many workers: a directory, and renames in it.

The life of a job, each arrow one rename (`queue_names` has the names, `queue_moves` the moves):

    server.submit        tmp/… ──────────────▶ queue/S.a00_pending
    worker.claim         queue/S.a00_pending ─▶ queue/S.a00_processing_by_dev1
    worker.complete      tmp/… ──────────────▶ queue/S.a00_complete_from_dev1, then the claim is removed
    server.take          queue/S.a00_complete_from_dev1 ─▶ done/…, and the group is the trainer's
    worker.hand_back     queue/S.a00_processing_by_dev1 ─▶ queue/S.a00_pending        (the same attempt)
    worker.fail, death   queue/S.a00_processing_by_dev1 ─▶ queue/S.a01_pending        (the next attempt)
    … for the last time  queue/S.a02_processing_by_dev1 ─▶ quarantine/S.a02_failed (with a .reason)
    unusable file        queue/S.a00_… ─▶ quarantine/S.a00_broken_…, and the server issues S.a01_pending

Why nothing is lost. A file appears whole (temporary file, rename). A result is published before its claim is
removed, so between the two there is one file too many, never one too few. A worker holds a kernel lock before
it claims; whoever gets that lock knows that the worker is dead, and keeps it while the claims are made
pending. A restarted worker does that for its own leftovers before its first claim, or they would look alive
for ever. The server keeps every open job in memory: one that is nowhere to be seen in three looks at the
directory and by its possible names is issued again and counted.

Why nothing is used twice. The server takes a result only if the job is open, and closes it with that. The
trainer's checkpoint carries the set of sequence numbers that it consumed; `ServerQueue.open` is given it, and
what lies in done/ beyond it is given back when the job is submitted again. Submitting is idempotent: a job
whose file exists is adopted.

Why a poison job takes no others along. A job that failed before is claimed alone.

No operation waits, no wall clock is read. Files are checked by `job_file`; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Collection, Container
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import NamedTuple, Self

from async_grpo.directory_watch import IN_MOVED_TO, DirectoryWatch, sleep_until
from async_grpo.errors import BadFileError, QueueError, RunDirError
from async_grpo.job_file import decode_group, decode_job, encode_group, encode_job
from async_grpo.locks import describe_holder
from async_grpo.queue_files import Files, OsFiles, prepare_root
from async_grpo.queue_moves import Moves
from async_grpo.queue_names import (
    BROKEN,
    COMPLETE,
    DUPLICATE,
    FAILED,
    PENDING,
    PENDING_END,
    PROCESSING,
    JobName,
    parse_name,
    parse_set_aside,
    reason_name,
    set_aside_name,
)
from async_grpo.queue_workers import (
    LOOK_S,
    Reaper,
    WorkerState,
    live_workers,
    recover_dead,
    server_lock,
    worker_lock,
)
from async_grpo.records import Job, RolloutGroup

MAX_OPEN = 256  # more files than one read of a directory returns, and a listing may miss one
DEFAULT_MAX_ATTEMPTS = 3

_LOOKS_BEFORE_MISSING = 3
_CACHED_NAMES = (
    64  # pending names that a worker remembers, so that it does not list the directory for every claim
)
_CACHE_S = 0.05  # how long: an older job that is pending again must not wait behind newer ones
_TAKEOVER_S = 5.0  # how long a starting worker waits while the server tidies up after its predecessor


class QueueCounts(NamedTuple):
    pending: int
    processing: int
    complete: int
    quarantined: int  # jobs given up; unusable files of jobs that were issued again are not counted


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


class Claim(NamedTuple):
    """A job that this worker has, until it completes, fails or hands it back."""

    job: Job
    attempt: int
    name: JobName


class ServerQueue:
    """The parameter server's side.

    Methods are for one thread, except `recover_dead`, `workers` and `counts`.
    """

    def __init__(self, root: Path, run_id: str, max_attempts: int, max_open: int, files: Files) -> None:
        self.root, self.run_id = root, run_id
        self.healing = Healing()
        self.given_up: dict[int, GivenUp] = {}  # in the order in which it was noticed
        self._max_attempts, self._max_open = max_attempts, max_open
        self._moves = Moves(files, "server")
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
        durable: bool = False,
        watch_workers: bool = True,
        files: Files | None = None,
    ) -> Self:
        """Become the one server of the queue in `root`; `RunDirError` names the one that is there already.

        consumed: sequence numbers that the checkpoint which this run continues from has used or given up.
        Submit all
            others again: what an earlier server left of them is adopted, generated groups are given back.
        durable: sync every file and rename to the disk; a power cut then costs no generated group. It never
        costs
            more than that.
        watch_workers: recover the jobs of a dead worker in a thread, within milliseconds. Without it call
            `recover_dead` yourself.
        """
        root = Path(root)
        prepare_root(root)
        queue = cls(root, run_id, max_attempts, max_open, files or OsFiles(root, durable=durable))
        if not queue._lock.try_acquire({"run_id": run_id, "max_attempts": max_attempts}):
            raise RunDirError(
                f"The queue in {root} has a server: {describe_holder(queue._lock.holder())}. "
                "One run directory has one parameter server; stop that one or choose another --run-dir."
            )
        queue._inherit(consumed)
        if watch_workers:
            queue._reaper = Reaper(root, queue.recover_dead, lambda: os.eventfd_write(queue._death, 1))
        return queue

    def close(self) -> None:
        """Stop being the server. The files stay as they are, workers go on with what they have."""
        if self._reaper is not None:
            self._reaper.close()
        self._watch.close()
        os.close(self._death)
        self._lock.release()

    def submit(self, job: Job) -> None:
        """Issue a job, or adopt what an earlier server left of it: a claim, a result, a group in done/.

        `DiskFullError` if there is no room: the job was not issued, submit it again.
        """
        if job.run_id != self.run_id or job.seq in self._open:
            raise QueueError(
                f"Job {job.seq} of run {job.run_id} is open already, or of another run than {self.run_id}."
            )
        if len(self._open) >= self._max_open:
            raise QueueError(
                f"{self._max_open} jobs are open, which is the bound: take finished groups first."
            )
        attempt = self._next_attempt.pop(job.seq, 0)
        if not self._adopt(job.seq):
            self._moves.publish(encode_job(job), f"queue/{JobName(job.seq, attempt, PENDING)}")
        self._open[job.seq], self._attempts[job.seq] = job, attempt
        self._highest = max(self._highest, job.seq)

    def finished(self) -> list[JobName]:
        """Finished groups of open jobs, oldest first, one a job.

        Mends what the look at the directory shows.
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
        return list(results.values())

    def take(self, entry: JobName) -> RolloutGroup | None:
        """A finished group, archived and checked: it is the trainer's now, and no other result of the job
        will be.

        None if there is nothing to have: the file was unusable (set aside; its job is issued again) or a
        duplicate.
        """
        job = self._open.get(entry.seq) or (
            self.given_up[entry.seq].job if entry.seq in self.given_up else None
        )
        if job is None:
            self._refuse(entry)
            return None
        try:
            group = self._read_group(entry, job)
        except FileNotFoundError:
            return None
        except BadFileError as error:
            self._moves.set_aside(entry, BROKEN, f"{entry}: {error}\n")
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
            if any(
                "_complete_from_" in name or "_failed" in name or "_broken" in name for name in woken.names
            ):
                return True
            if (woken.look or not woken.names) and self._something_new():
                return True
            if time.monotonic() >= deadline:
                return False

    @property
    def open_jobs(self) -> int:
        """Jobs issued, and neither taken nor given up."""
        return len(self._open)

    def counts(self) -> QueueCounts:
        return queue_counts(self._moves.files)

    def workers(self) -> list[WorkerState]:
        return live_workers(self.root)

    def trim_done(self, keep: int, consumed: Container[int]) -> int:
        """Delete the oldest archived groups but `keep`; returns how many.

        Only groups that are in `consumed`, the set that the last durable checkpoint carries: the others would
        be given back on resume.
        """
        files = self._moves.files
        folders = [(folder, sorted(files.names(folder))) for folder in _done_folders(files)]
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
        """Sort what an earlier server left: groups of consumed jobs are archived, the rest waits for
        `submit`.

        Jobs that no worker has are removed, as `submit` writes them anew with today's versions. While the run
        was down, deaths of workers do not count as attempts.
        """
        moves = self._moves
        moves.clear_temporaries("server")
        for folder in _done_folders(moves.files):
            for name in filter(None, map(parse_name, moves.files.names(folder))):
                if name.state == COMPLETE and name.seq not in consumed:
                    self._left[name.seq] = f"{folder}/{name}"
        for device in {name.device for name in moves.listing() if name.state == PROCESSING}:
            lock = worker_lock(self.root, device)
            if lock.try_acquire():
                moves.release_claims(device, self._max_attempts, counts=False, reason="")
                lock.release()
        for name in sorted(moves.listing()):
            if name.state == PENDING and moves.drop(f"queue/{name}"):
                self._next_attempt[name.seq] = name.attempt
            elif name.state == COMPLETE and name.seq in consumed:
                moves.archive(name)
            elif name.seq not in consumed and (name.state == COMPLETE or name.seq not in self._left):
                self._left[name.seq] = f"queue/{name}"
        for aside in filter(None, map(parse_set_aside, moves.files.names("quarantine"))):
            if aside.seq not in consumed:
                self._next_attempt[aside.seq] = max(self._next_attempt.get(aside.seq, 0), aside.attempt + 1)

    def _adopt(self, seq: int) -> bool:
        """Make the file that an earlier server left of this job the one of this server."""
        left = self._left.pop(seq, None)
        if left is None:
            return False
        if left.startswith("done/"):
            return self._moves.move(left, f"queue/{left.rpartition('/')[2]}")
        return True  # a claim or a result: if it is gone by now, it went on to another state

    def _read_group(self, entry: JobName, job: Job) -> RolloutGroup:
        group = decode_group(
            self._moves.files.read(f"queue/{entry}"),
            expect_seq=entry.seq,
            expect_run=self.run_id,
            expect_attempt=entry.attempt,
            expect_worker=f"dev{entry.device}",
        )
        made, issued = group.job, job
        if (made.seed, made.num_generations) != (issued.seed, issued.num_generations) or not _same(
            made.row, issued.row
        ):
            raise BadFileError("it answers another prompt, seed or group size than the job that was issued")
        return group

    def _refuse(self, name: JobName) -> None:
        """A result that no open job waits for: a second one, or one of a job that was never issued."""
        if name.seq > self._highest:
            self.healing.unknown += 1
            self._moves.set_aside(
                name, BROKEN, f"{name}: no job {name.seq} was issued by run {self.run_id}.\n"
            )
        elif self._moves.archive(name, DUPLICATE):
            self.healing.duplicates += 1

    def _look_for(self, seq: int) -> None:
        """An open job is in no state that `finished` saw. Find out why.

        Given up, unusable, or really gone.
        """
        entries = map(parse_set_aside, self._moves.files.names("quarantine"))
        aside = [
            entry for entry in entries if entry and entry.seq == seq and entry.attempt >= self._attempts[seq]
        ]
        last = max(aside, key=lambda entry: (entry.attempt, entry.kind == FAILED), default=None)
        if last is not None and last.kind == FAILED:
            self._give_up(seq, last.attempt, self._moves.reason(last.name))
        elif last is not None:
            self.healing.broken += 1
            self._issue_again(seq, last.attempt + 1, self._moves.reason(last.name))
        else:
            self._looks[seq] = self._looks.get(seq, 0) + 1
            if self._looks[seq] >= _LOOKS_BEFORE_MISSING and not self._exists_anywhere(seq):
                self.healing.missing += 1
                self._issue_again(seq, self._attempts[seq] + 1, None)

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
        devices = [worker.device for worker in self.workers()]
        attempts = range(self._attempts[seq], self._attempts[seq] + self._max_attempts + 1)
        names = [JobName(seq, attempt, PENDING) for attempt in attempts]
        for state in (PROCESSING, COMPLETE):
            names += [JobName(seq, attempt, state, device) for attempt in attempts for device in devices]
        failed = [
            f"quarantine/{set_aside_name(JobName(seq, attempt, PENDING), FAILED)}" for attempt in attempts
        ]
        paths = [f"queue/{name}" for name in names] + failed
        return any(map(self._moves.files.exists, paths * 2))

    def _something_new(self) -> bool:
        """For a look without an event: is there a finished group that `finished` did not return yet?"""
        names = [name for name in self._moves.listing() if name.state == COMPLETE]
        return any(name.seq in self._open and name not in self._seen for name in names)


class WorkerQueue:
    """One worker process' side, for one thread. Its lock lasts as long as the process.

    A forked child has no part in it.
    """

    def __init__(self, root: Path, device: int, files: Files) -> None:
        self.root, self.device = root, device
        self._moves = Moves(files, f"dev{device}")
        self._lock = worker_lock(root, device)
        self._claims: dict[int, Claim] = {}
        self._cache: deque[JobName] = deque()
        self._cache_until = 0.0
        self._server: dict[str, object] = {}
        self._watch = DirectoryWatch({root / "queue": IN_MOVED_TO})

    @classmethod
    def open(
        cls,
        root: Path | str,
        worker_id: int | None,
        device: str,
        *,
        durable: bool = False,
        files: Files | None = None,
    ) -> Self:
        """Become worker dev{worker_id}, or the first that is free for None. `QueueError` names who is it
        already.

        device: what it computes on, e.g. `cuda:1`; for people to read. May be called before there is a
        server.
        """
        root = Path(root)
        prepare_root(root)
        files = files or OsFiles(root, durable=durable)
        numbers = [worker_id] if worker_id is not None else range(1, 1000)
        for number in numbers:
            queue = cls(root, number, files)
            if queue._enter(device, patient=worker_id is not None):
                return queue
            queue._watch.close()
        holder = describe_holder(worker_lock(root, numbers[0]).holder())
        raise QueueError(
            f"Worker dev{numbers[0]} runs already: {holder}. Give this one another number, or stop that one."
        )

    def _enter(self, device: str, *, patient: bool) -> bool:
        """Take the lock, then make pending what an earlier worker of this number left.

        False if it is alive.
        """
        deadline = time.monotonic() + (_TAKEOVER_S if patient else 0)
        while not self._lock.try_acquire({"torch_device": device}):
            holder = self._lock.holder()
            server = server_lock(self.root).holder()
            if holder is not None and holder.get("pid") != (server or {}).get("pid"):
                return False
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)  # the server is making our predecessor's jobs pending
        self._learn_server()
        reason = f"Worker {self.name} died while it had this job."
        self._moves.release_claims(self.device, self._max_attempts, counts=self.server_alive(), reason=reason)
        return True

    @property
    def name(self) -> str:
        return f"dev{self.device}"

    def close(self) -> None:
        """Hand back what this worker still has, and free its number."""
        for claim in list(self._claims.values()):
            self.hand_back(claim)
        self._watch.close()
        self._lock.release()

    def claim(self, limit: int, skip: Collection[int] = ()) -> list[Claim]:
        """Up to `limit` of the oldest pending jobs, without waiting. A job that failed before comes alone.

        skip: sequence numbers to leave to others, e.g. jobs that this worker handed back.
        """
        self._lock.require()
        if time.monotonic() >= self._cache_until:
            self._cache.clear()
        claims: list[Claim] = []
        may_list = True
        while len(claims) < limit:
            if not self._cache and may_list:
                self._list_pending(skip)
                may_list = False
            if not self._cache or (self._cache[0].attempt and claims):
                break
            name = self._cache.popleft()
            claim = None if name.seq in skip else self._claim(name)
            if claim is not None:
                claims.append(claim)
                self._claims[claim.job.seq] = claim
                if name.attempt:
                    break
        return claims

    def complete(self, claim: Claim, group: RolloutGroup) -> None:
        """Publish the result, then drop the claim. `DiskFullError`.

        The claim is kept, call again when there is room.
        """
        self._lock.require()
        if (group.job.seq, group.attempt, group.worker) != (claim.job.seq, claim.attempt, self.name):
            raise QueueError(f"The group of job {group.job.seq} is not an answer to claim {claim.name}.")
        self._moves.publish(encode_group(group), f"queue/{claim.name.becomes(COMPLETE, self.device)}")
        self._moves.drop(f"queue/{claim.name}")
        self._claims.pop(claim.job.seq, None)

    def fail(self, claim: Claim, error_text: str) -> None:
        """The job could not be done: pending again with the next attempt, or given up with `error_text`
        beside it.

        `DiskFullError` if the text finds no room: the claim is kept, call again.
        """
        self._lock.require()
        self._moves.try_again(claim.name, self._max_attempts, f"{claim.name}: {error_text}\n")
        self._claims.pop(claim.job.seq, None)

    def hand_back(self, claim: Claim) -> None:
        """Pending again with the same attempt: this worker stops, or cannot serve the job now."""
        self._lock.require()
        self._moves.move(f"queue/{claim.name}", f"queue/{claim.name.pending(claim.attempt)}")
        self._claims.pop(claim.job.seq, None)

    def wait(self, timeout_s: float, skip: Collection[int] = ()) -> bool:
        """Sleep until a job is pending that is not in `skip`; False when the time is over."""
        deadline = time.monotonic() + timeout_s
        look = True
        while True:
            if look and any(name.state == PENDING and name.seq not in skip for name in self._moves.listing()):
                return True
            if time.monotonic() >= deadline:
                return False
            woken = self._watch.wait(sleep_until(deadline, LOOK_S))
            look = woken.look or not woken.names or any(name.endswith(PENDING_END) for name in woken.names)

    def pending(self) -> int:
        """Jobs that want a worker."""
        return queue_counts(self._moves.files).pending

    def alive_workers(self) -> int:
        """Workers that are alive, this one included."""
        return len(live_workers(self.root))

    def server_alive(self) -> bool:
        return server_lock(self.root).is_held()

    @property
    def _max_attempts(self) -> int:
        told = self._server.get("max_attempts")
        return told if isinstance(told, int) else DEFAULT_MAX_ATTEMPTS

    def _learn_server(self) -> None:
        """The server's lock file says which run it serves and how often a job may be tried."""
        self._server = dict(server_lock(self.root).last_owner())

    def _list_pending(self, skip: Collection[int]) -> None:
        entries = [entry for entry in self._moves.files.names("queue") if entry.endswith(PENDING_END)]
        if skip:
            entries = [entry for entry in entries if (name := parse_name(entry)) and name.seq not in skip]
        self._cache = deque(filter(None, map(parse_name, nsmallest(_CACHED_NAMES, entries))))
        self._cache_until = time.monotonic() + _CACHE_S

    def _claim(self, name: JobName) -> Claim | None:
        """One rename.

        None if another worker was faster, or the file is unusable (set aside for the server to see).
        """
        mine = name.becomes(PROCESSING, self.device)
        if not self._moves.move(f"queue/{name}", f"queue/{mine}"):
            return None
        try:
            job = decode_job(self._moves.files.read(f"queue/{mine}"), expect_seq=name.seq)
            if job.run_id != self._server.get("run_id"):
                self._learn_server()
            if job.run_id != self._server.get("run_id"):
                raise BadFileError(
                    f"it is a job of run {job.run_id!r}, this is run {self._server.get('run_id')!r}"
                )
        except FileNotFoundError:
            return None
        except BadFileError as error:
            self._moves.set_aside(mine, BROKEN, f"{name}: {error}\n")
            return None
        return Claim(job, name.attempt, mine)


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


def _done_folders(files: Files) -> list[str]:
    with suppress(NotADirectoryError):
        return [f"done/{name}" for name in sorted(files.names("done")) if name.isdigit()]
    return []


def _same(made: dict[str, object], issued: dict[str, object]) -> bool:
    return made == issued or json.dumps(made) == json.dumps(issued)  # the second because NaN is not NaN
