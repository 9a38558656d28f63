"""Locks that the kernel frees the moment their holder is dead, however it died. They say which processes live.

`RUN_DIR/server.lock` is the one lock that means "the parameter server lives". The server takes it when it starts and
holds it to its end; nothing else decides whether the server lives. A server that dies frees it, so that another can
take over; no two can hold it. The holder's note in the file identifies it, and has the `run_id` once it has begun
to issue jobs: a server that is still loading lives, but serves no worker. Each worker holds `alive/NAME.lock` likewise.

Why two kinds of lock. These are POSIX record locks (`lockf`), not `flock`: a `flock` belongs to the open file, so a
forked grandchild of a killed worker, such as a reward's subprocess, would keep it held. The price is that a record lock
is lost when its process closes *any* descriptor of the file, and that it does not exclude within one process. So every
lock of this process is in `_held`, the file of a held lock is never opened a second time, and `require()` takes it
again (a no-op of a microsecond) before it is relied upon. The weights have open-file-description locks instead
(`async_grpo_ipc.locks`), because exporters and readers of one process must exclude each other there. They are about
slots of memory and know of no run: no process asks them whether the server lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from async_grpo.errors import BadFileError, QueueError
from async_grpo.rundir.files import space_for
from async_grpo.rundir.paths import SERVER_LOCK
from async_grpo.rundir.reading import open_plain, parse_object

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid
_OWNER_BYTES = 4096

_guard = threading.RLock()
_held: dict[tuple[int, int], KernelLock] = {}  # (device, inode) of every lock that this process holds


class KernelLock:
    """An exclusive lock on a file that is never deleted, with a note in it about its holder.

    >>> lock = KernelLock(Path("server.lock"))
    >>> lock.try_acquire({"role": "parameter server"})
    True
    >>> lock.holder()["pid"] == os.getpid()
    True
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._path = str(path)  # a pathlib call would cost more than the system call
        self._fd = -1
        self._pid = 0
        self._inode = (0, 0)  # of the file that is held: asked of the kernel once
        self._owner: dict[str, Any] = {}

    def try_acquire(self, owner_info: dict[str, Any] | None = None) -> bool:
        """Take the lock without waiting; False if a process, this one included, has it.

        owner_info: written into the note, with pid, host and time.
        """
        with _guard:
            if self.held_here:
                return True
            if self._identity() in _held:
                return False
            fd = _open(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if isinstance(error, (BlockingIOError, PermissionError)):  # EAGAIN or EACCES, as POSIX allows both
                    return False
                raise
            self._fd, self._pid, self._inode = fd, os.getpid(), _inode(fd)
            self._owner = {"pid": self._pid}
            _held[self._inode] = self
            if owner_info is not None:
                since = datetime.now(UTC).isoformat(timespec="seconds")  # for people: nothing compares it
                self._owner |= {"host": socket.gethostname(), "since": since, **owner_info}
                with suppress(OSError):  # a full disk costs the note, not the lock
                    self._write_note()
            return True

    def add_to_note(self, **info: object) -> None:
        """Add to the holder's note. `DiskFullError` if there is no room; call again."""
        self._owner |= info
        with space_for(self.path):
            self._write_note()

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held. The file stays."""
        with _guard:
            if self.held_here:
                _held.pop(self._inode, None)
                os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    @property
    def held_here(self) -> bool:
        """Whether this very object, in this very process, has the lock."""
        return self._fd >= 0 and self._pid == os.getpid()

    def require_process(self) -> None:
        """`QueueError` in a forked child, which has none of its parent's locks."""
        if not self.held_here:
            raise QueueError(f"{self.path.name} is not held by process {os.getpid()}: a forked child has no locks.")

    def require(self) -> None:
        """`QueueError` unless the lock is still ours. A forked child has none, and the file may have been deleted."""
        self.require_process()
        with _guard:
            if self._identity() != self._inode:
                raise QueueError(
                    f"{self.path} was deleted or replaced while in use, so it protects nothing. Start again."
                )
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise QueueError(f"{self.path} was taken over by {self.holder()}.") from error

    def is_held(self) -> bool:
        """Whether any process, this one included, has the lock."""
        return self.holder() is not None

    def holder(self) -> dict[str, Any] | None:
        """The process that has the lock: `{"pid": …}` from the kernel, and its own note. None if the lock is free."""
        pid, note = self._look()
        if pid is None:
            return None
        return note if note.get("pid") == pid else {"pid": pid}

    def last_owner(self) -> dict[str, Any]:
        """The note of the present or last holder; empty if there is none."""
        return self._look()[1]

    def _look(self) -> tuple[int | None, dict[str, Any]]:
        """The holder's pid by the kernel, None for a free lock, and the note in the file, which may be older."""
        with _guard:
            mine = _held.get(self._identity() or (0, 0))
            if mine is not None:
                return mine._pid, dict(mine._owner)
            try:
                fd = _open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                return None, {}
            try:
                probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, probe))
                note = _parse_owner(os.pread(fd, _OWNER_BYTES, 0))
                return (None if kind == fcntl.F_UNLCK else pid), note
            finally:
                os.close(fd)

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _write_note(self) -> None:
        note = json.dumps(self._owner).encode()[:_OWNER_BYTES]
        os.pwrite(self._fd, note, 0)
        os.ftruncate(self._fd, len(note))


def server_lock(root: Path) -> KernelLock:
    """The lock that the parameter server of the run in `root` holds as long as it lives."""
    return KernelLock(root / SERVER_LOCK)


def server_alive(root: Path) -> bool:
    """Whether the run in `root` has a live parameter server."""
    return server_lock(root).is_held()


def describe_holder(holder: dict[str, Any] | None) -> str:
    """`process 4711 on host gpu1 since 2026-01-01T12:00:00+00:00`, for messages."""
    if not holder:
        return "nobody"
    host = f" on host {holder['host']}" if "host" in holder else ""
    since = f" since {holder['since']}" if "since" in holder else ""
    return f"process {holder.get('pid', 'unknown')}{host}{since}"


def _open(path: Path, flags: int) -> int:
    try:
        return open_plain(path, flags)
    except BadFileError as error:
        if isinstance(error.__cause__, PermissionError):
            raise error.__cause__ from None  # the run is someone else's, and callers say so
        raise BadFileError(f"{path} cannot be used: {error}") from error


def _inode(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _parse_owner(note: bytes) -> dict[str, Any]:
    try:
        return parse_object(note)
    except BadFileError:
        return {}


def _forget_in_child() -> None:
    """A child inherits the descriptors, not the locks.

    Closing them there does not touch the parent's locks.
    """
    global _guard
    _guard = threading.RLock()
    for lock in _held.values():
        with suppress(OSError):
            os.close(lock._fd)
        lock._fd = -1
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
