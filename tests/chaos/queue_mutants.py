"""Bugs to seed in the queue, mistakes that somebody could make. Every one must be caught by some fault test."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from inspect import isfunction
from typing import Any

from async_grpo.queue import ServerQueue, WorkerQueue, codec, recovery, transitions
from async_grpo.queue import server as queue_server
from async_grpo.queue.filesystem import job_files
from async_grpo.queue.names import COMPLETE, JobName, reason_name, set_aside_name
from async_grpo.queue.transitions import Moves
from async_grpo.rundir import locks


def claim_removed_before_the_result_is_there() -> None:
    def complete(self: Any, claim: Any, group: Any) -> None:
        self._moves.drop(f"queue/{claim.name}")
        self._moves.publish(codec.encode_group(group), f"queue/{claim.name._replace(state=COMPLETE)}")
        self._claims.pop(claim.job.seq, None)

    WorkerQueue.complete = complete  # type: ignore[method-assign]


def files_written_in_place() -> None:
    Moves.publish = lambda self, data, to, **_: self.files.create(to, data)  # type: ignore[method-assign]


def nobody_recovers() -> None:
    Moves.release_claims = lambda self, *args, **kwargs: []  # type: ignore[method-assign]


def leftovers_of_a_restarted_worker_stay() -> None:
    """The lease is the device's: once dev1 is back, what it had before looks alive."""

    WorkerQueue._tidy_up = lambda self, **_: self._learn_server()  # type: ignore[method-assign]


def jobs_taken_from_the_living() -> None:
    def recover_dead(root: Any, moves: Any, max_attempts: int, *, counts: bool = True) -> list[int]:
        return [seq for who in moves.claimants() for seq in moves.release_claims(who, max_attempts, counts=counts)]

    queue_server.recover_dead = recover_dead
    recovery.recover_dead = recover_dead


def results_not_deduplicated() -> None:
    def taken(self: Any, entry: JobName) -> Any:
        open_job = self._open.get(entry.seq)
        group = take(self, entry)
        if group is not None and open_job is not None:
            self.reopened = {**getattr(self, "reopened", {}), entry.seq: open_job.job}
        return group

    def finished(self: Any) -> Any:
        names = [name for name in sorted(job_files(self._moves.files)) if name.state == COMPLETE]
        again = [name for name in names if name.seq in getattr(self, "reopened", {}) and name.seq not in self._open]
        for name in again:
            self._open[name.seq] = queue_server.OpenJob(self.reopened[name.seq], name.attempt)
        return original(self)

    original, take = ServerQueue.finished, ServerQueue.take
    ServerQueue.take = taken  # type: ignore[method-assign]
    ServerQueue.finished = finished  # type: ignore[method-assign]


def consumed_groups_not_given_back() -> None:
    transitions.done_folders = lambda files: []


def broken_and_missing_jobs_not_issued_again() -> None:
    ServerQueue._issue_again = lambda self, *args: None  # type: ignore[method-assign]


def no_checksum() -> None:
    codec._checksum = lambda *parts: b"00000000"


def attempts_not_counted() -> None:
    def try_again(self: Any, claim: Any, max_attempts: int, reason: str) -> bool:
        return bool(self.move(f"queue/{claim}", f"queue/{claim.pending(claim.attempt)}"))

    Moves.try_again = try_again  # type: ignore[method-assign]


def handing_back_counts_as_a_failure() -> None:
    def hand_back(self: Any, claim: Any) -> None:
        self._moves.try_again(claim.name, self._max_attempts, "handed back")
        self._claims.pop(claim.job.seq, None)

    WorkerQueue.hand_back = hand_back  # type: ignore[method-assign]


def reason_written_last() -> None:
    def set_aside(self: Any, name: Any, kind: str, reason: str) -> bool:
        target = set_aside_name(name, kind)
        moved = self.move(f"queue/{name}", f"quarantine/{target}")
        self.publish(reason.encode(), f"quarantine/{reason_name(target)}")
        return bool(moved)

    Moves.set_aside = set_aside  # type: ignore[method-assign]


def locks_that_a_forked_child_keeps() -> None:
    """`flock` belongs to the open file, which a child shares."""

    class Flock:
        LOCK_EX, LOCK_NB, F_UNLCK, F_WRLCK, F_GETLK = fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.F_UNLCK, fcntl.F_WRLCK, 0
        lockf = staticmethod(fcntl.flock)

        @staticmethod
        def fcntl(fd: int, command: int, probe: bytes) -> bytes:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return struct.pack(
                    "@hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, locks._parse_owner(os.pread(fd, 4096, 0)).get("pid", 0)
                )
            return struct.pack("@hhqqi4x", fcntl.F_UNLCK, 0, 0, 0, 0)

    locks.fcntl = Flock  # type: ignore[assignment]


MUTANTS: dict[str, Callable[[], None]] = {
    name: mutant for name, mutant in list(globals().items()) if isfunction(mutant) and mutant.__module__ == __name__
}
