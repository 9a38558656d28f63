"""The moves of the protocol that both sides make: publish, try again, give up, set aside."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from async_grpo.errors import DiskFullError, QueueError
from async_grpo.queue.filesystem import Files, done_folders, job_files
from async_grpo.queue.names import (
    BROKEN,
    COMPLETE,
    DUPLICATE,
    FAILED,
    PENDING_END,
    PROCESSING,
    JobName,
    reason_name,
    set_aside_name,
    shard,
)
from async_grpo.queue.wakeups import JobPipe

DEFAULT_MAX_ATTEMPTS = 3

_REASON_BYTES = 1 << 20


class Moves:
    """The queue's files as one process sees them.

    `owner` (`server`, or a worker's name) has a folder of tmp/ of its own: processes that create files in the same
    folder wait for each other, long on ext4. Jobs that become pending are announced in `pipe`.
    """

    def __init__(self, files: Files, owner: str, pipe: JobPipe) -> None:
        self.files = files
        self._pipe = pipe
        self._folder = f"tmp/{owner}"
        self._numbers = itertools.count()
        with suppress(OSError):  # a full disk: `publish` tries again
            files.make_folder(self._folder)

    def publish(self, data: bytes, to: str, *, durable: bool = False) -> None:
        """Make a file appear whole. On an error nothing of it is left.

        durable: return when a power cut cannot take it any more.

        `DiskFullError` if there is no space.
        """
        temporary = f"{self._folder}/{os.getpid()}.{next(self._numbers)}"
        try:
            try:
                self.files.create(temporary, data)
            except FileNotFoundError:  # a person has deleted the folder
                self.files.make_folder(self._folder)
                self.files.create(temporary, data)
            if durable:
                self.files.sync(temporary)
            self.files.rename(temporary, to)
        except OSError as error:
            with suppress(OSError):
                self.files.unlink(temporary)
            raise _named(error, to) from error
        self._announce(to)
        if durable:
            self.files.sync(to.rpartition("/")[0])

    def move(self, path: str, to: str) -> bool:
        """One rename; False if `path` is gone, because another process was faster."""
        try:
            self.files.rename(path, to)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _named(error, to) from error
        self._announce(to)
        return True

    def drop(self, path: str) -> bool:
        """Remove a file; False if it is gone already."""
        try:
            self.files.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def clear_temporaries(self, owner: str) -> None:
        """Remove what a dead `owner` left half-written. The caller holds the owner's lock."""
        folder = f"tmp/{owner}"
        for entry in self.files.names(folder) if self.files.exists(folder) else ():
            self.drop(f"{folder}/{entry}")

    def set_aside(self, name: JobName, kind: str, reason: str) -> bool:
        """Move a file to quarantine/. The reason is there first, so nothing is ever set aside without one."""
        target = set_aside_name(name, kind)
        self.publish(_limited(reason), f"quarantine/{reason_name(target)}")
        return self.move(f"queue/{name}", f"quarantine/{target}")

    def try_again(self, claim: JobName, max_attempts: int, reason: str) -> bool:
        """After a failed attempt: make the job pending with the next one (True), or give it up (False)."""
        if claim.attempt + 1 >= max_attempts:
            self.set_aside(claim, FAILED, reason)
            return False
        return self.move(f"queue/{claim}", f"queue/{claim.pending(claim.attempt + 1)}")

    def claimants(self) -> list[str]:
        """Names of the workers that have jobs, dead or alive."""
        return sorted({name.worker for name in job_files(self.files) if name.state == PROCESSING and name.worker})

    def release_claims(self, worker: str, max_attempts: int, *, counts: bool) -> list[int]:
        """Make the jobs of a dead worker pending again; returns their sequence numbers. The caller holds its lock.

        counts: whether the death counts as an attempt; it does not when the whole run was down. A worker that died
        between publishing a result and dropping its claim has done the job.
        """
        self.clear_temporaries(worker)
        released = []
        for name in sorted(job_files(self.files)):
            if (name.state, name.worker) != (PROCESSING, worker):
                continue
            if self._result_exists(name):
                self.drop(f"queue/{name}")
            else:
                if counts:
                    self.try_again(name, max_attempts, f"Worker {worker} died while it had this job.")
                else:
                    self.move(f"queue/{name}", f"queue/{name.pending(name.attempt)}")
                released.append(name.seq)
        return released

    def make_folder(self, folder: str) -> None:
        """Nothing happens if it is there. `DiskFullError` if there is no space."""
        try:
            self.files.make_folder(folder)
        except OSError as error:
            raise _named(error, folder) from error

    def _announce(self, path: str) -> None:
        if path.startswith("queue/") and path.endswith(PENDING_END):
            self._pipe.announce([path.removeprefix("queue/").removesuffix(PENDING_END)])

    def _result_exists(self, claim: JobName) -> bool:
        """First queue/, then done/: that is the way a result goes, so it cannot slip past."""
        result = claim._replace(state=COMPLETE)
        broken = f"quarantine/{set_aside_name(result, BROKEN)}"
        return any(map(self.files.exists, (f"queue/{result}", f"{shard(claim.seq)}/{result}", broken)))


class Done:
    """The archive, done/: listed once, and known from then on by what the server moves."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        folders = done_folders(moves.files)
        self._folders = set(folders)
        self.names = [name for folder in folders for name in job_files(moves.files, folder)]

    def newest_bytes(self, root: Path) -> int:
        """Size of the newest group, 0 if there is none."""
        newest = max(self.names, default=None)
        with suppress(FileNotFoundError):
            if newest is not None:
                return (root / shard(newest.seq) / str(newest)).stat(follow_symlinks=False).st_size
        return 0

    def add(self, name: JobName, state: str = COMPLETE) -> bool:
        """Move a finished group here from queue/; False if it is gone."""
        folder, kept = shard(name.seq), name._replace(state=state)
        if folder not in self._folders:
            self._moves.make_folder(folder)
            self._folders.add(folder)
        found = self._moves.move(f"queue/{name}", f"{folder}/{kept}")
        if not found:  # or a person has deleted the folder
            self._moves.make_folder(folder)
            found = self._moves.move(f"queue/{name}", f"{folder}/{kept}")
        if found:
            self.names.append(kept)
        return found

    def give_back(self, name: JobName) -> bool:
        """Move a group back to queue/; False if it is gone."""
        found = self._moves.move(f"{shard(name.seq)}/{name}", f"queue/{name}")
        self.names.remove(name)
        return found

    def trim(self, keep: int, consumed: Container[int]) -> int:
        """Delete the oldest groups beyond `keep` that are duplicates or in `consumed`; returns how many.

        As many groups of evaluations are kept beside them: the trainer needs none of those again.
        """
        self.names.sort()
        trained = [name for name in self.names if name.trains]
        others = self.names[len(trained) :]
        removable = [name for name in trained if name.state == DUPLICATE or name.seq in consumed]
        removable = removable[: max(0, len(trained) - keep)] + others[: max(0, len(others) - keep)]
        for name in removable:
            self._moves.drop(f"{shard(name.seq)}/{name}")
        removed = set(removable)
        self.names = [name for name in self.names if name not in removed]
        return len(removable)


def _limited(reason: str) -> bytes:
    """The end of a traceback says most: keep that."""
    data = reason.encode(errors="replace")
    return data if len(data) <= _REASON_BYTES else b"[...]\n" + data[-_REASON_BYTES:]


def _named(error: OSError, path: str) -> OSError | QueueError:
    """A full disk, and a folder on another disk, in words; any other error as it is."""
    if error.errno == errno.EXDEV:
        return QueueError(
            f"{path} is not on the disk that the queue is on, so no file can be renamed to it. A folder of the run "
            "directory is a link or a mount: put a plain folder in its place, then continue with --resume."
        )
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    return DiskFullError(f"The disk is full: no room for {path}. Nothing is lost; work continues once there is room.")
