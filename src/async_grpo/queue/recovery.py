"""What becomes of jobs whose worker, server or last attempt is gone: they are made pending again, or adopted."""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from async_grpo.errors import DiskFullError
from async_grpo.queue.filesystem import OsFiles, job_files, set_aside_files
from async_grpo.queue.liveness import claims_for_others, worker_lock
from async_grpo.queue.names import (
    COMPLETE,
    FAILED,
    NOT_TRAINED_ON,
    PENDING,
    RETRIED,
    JobName,
    SetAside,
    parse_name,
    reason_name,
    set_aside_name,
    shard,
)
from async_grpo.queue.transitions import Done, Moves
from async_grpo.queue.wakeups import JobPipe


def recover_dead(root: Path, moves: Moves, max_attempts: int, *, counts: bool = True) -> list[int]:
    """Make the jobs of dead workers pending again; returns their sequence numbers.

    Never takes from a live process. `counts` says whether the death counts as an attempt; that of a process which
    claims for another machine never does.
    """
    recovered: list[int] = []
    for worker in moves.claimants():
        lock = worker_lock(root, worker)
        is_far = claims_for_others(lock.last_owner())
        if not lock.try_acquire():
            continue
        with lock, suppress(DiskFullError):  # no space for a reason: the claim stays, the next look tries again
            recovered += moves.release_claims(worker, max_attempts, counts=counts and not is_far)
    return recovered


def retry_given_up(root: Path | str, seq: int) -> bool:
    """Give a job of quarantine/ one more try, on a live run or not; False if no such job was given up."""
    files, pipe = OsFiles(Path(root)), JobPipe(Path(root))
    moves = Moves(files, "operator", pipe)
    try:
        for aside in set_aside_files(files):
            if (aside.seq, aside.kind) == (seq, FAILED):
                pending = JobName(seq, aside.attempt + 1, PENDING)
                if moves.move(f"quarantine/{aside.name}", f"queue/{pending}"):
                    moves.drop(f"quarantine/{reason_name(aside.name)}")
                    return True
        return False
    finally:
        pipe.close()
        files.close()


class Inheritance:
    """What an earlier server left. Jobs in `consumed` are over, and so are its evaluations; the rest waits for `adopt`.

    Args:
        consumed: sequence numbers that the checkpoint which the run continues from has used or given up.
    """

    def __init__(self, moves: Moves, done: Done, consumed: Container[int]) -> None:
        self._moves, self._done, self._consumed = moves, done, consumed
        self.files: dict[int, str] = {}  # job -> its claim, its result, or its group in done/
        self.next_attempt: dict[int, int] = {}  # of jobs that were tried before
        self.highest = -1  # sequence number
        self.highest_not_trained_on = NOT_TRAINED_ON - 1

    def sort(self, root: Path, max_attempts: int) -> None:
        """Look at every folder once. Afterwards queue/ has only claims of live workers and results."""
        self._moves.clear_temporaries("server")
        for name in self._done.names:
            self._knows(name.seq)
            if name.state == COMPLETE and not self._is_over(name.seq):
                self.files[name.seq] = f"{shard(name.seq)}/{name}"
        for aside in set_aside_files(self._moves.files):
            self._sort_set_aside(aside)
        recover_dead(root, self._moves, max_attempts, counts=False)  # the run was down: that is no fault of a job
        for name in sorted(job_files(self._moves.files)):
            self._sort_open(name)

    def adopt(self, seq: int) -> bool:
        """Make the file that is left of this job a file of the present server; False if it is gone."""
        left = self.files[seq]
        name = parse_name(left.rpartition("/")[2]) if left.startswith("done/") else None
        # a claim or a result in queue/ that is gone by now went on to another state
        adopted = name is None or self._done.give_back(name)
        del self.files[seq]  # not before the move: without space for it, `adopt` is called again
        return adopted

    def _sort_set_aside(self, aside: SetAside) -> None:
        """A job that was given up after the checkpoint is open again: resuming is one more try."""
        self._knows(aside.seq)
        if self._is_over(aside.seq):
            return
        self._tried(aside.seq, aside.attempt + 1)
        if aside.kind == FAILED:
            retried = set_aside_name(JobName(aside.seq, aside.attempt, PENDING), RETRIED)
            self._moves.move(f"quarantine/{reason_name(aside.name)}", f"quarantine/{reason_name(retried)}")
            self._moves.move(f"quarantine/{aside.name}", f"quarantine/{retried}")

    def _sort_open(self, name: JobName) -> None:
        self._knows(name.seq)
        if self._is_over(name.seq):
            self._end_consumed(name)
        elif name.state == PENDING and self._withdraw(name):  # `submit` writes today's versions into it
            self._tried(name.seq, name.attempt)
        elif name.state == COMPLETE or name.seq not in self.files:
            self.files[name.seq] = f"queue/{name}"

    def _withdraw(self, name: JobName) -> bool:
        """Remove a pending job; False if it is gone, or a folder, which a worker will set aside."""
        try:
            return self._moves.drop(f"queue/{name}")
        except IsADirectoryError:
            return False

    def _end_consumed(self, name: JobName) -> None:
        if name.state == COMPLETE:
            self._done.add(name)
        elif name.state == PENDING and not name.trains:
            self._withdraw(name)
        elif name.state == PENDING:  # it was given up, and an operator had it tried once more
            self._moves.set_aside(name, FAILED, f"{name}: the run was restarted before its next try.\n")

    def _knows(self, seq: int) -> None:
        if seq < NOT_TRAINED_ON:
            self.highest = max(self.highest, seq)
        else:
            self.highest_not_trained_on = max(self.highest_not_trained_on, seq)

    def _is_over(self, seq: int) -> bool:
        """Each server starts its evaluations again: a version that is trained again has other weights."""
        return seq >= NOT_TRAINED_ON or seq in self._consumed

    def _tried(self, seq: int, next_attempt: int) -> None:
        self.next_attempt[seq] = max(self.next_attempt.get(seq, 0), next_attempt)
