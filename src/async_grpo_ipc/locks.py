"""Locks of the kernel: which process may write a slot, which ones read it, and whether the exporter lives.

Open-file-description locks (`F_OFD_SETLK`) on single bytes of the shared control file:

* the kernel drops them when the holder dies, however it dies, so that no clean-up code can be missed (a
  counter in shared memory would leak with `kill -9`);
* unlike `lockf`, they belong to the opened file, not to the process, so that an exporter and several readers
  in one process exclude each other, and closing one of them drops only its own;
* unlike `flock`, one file has a lock per slot, and `F_OFD_GETLK` tells whether one is held without taking it.

The control file is a memfd, so that the file system of the run directory (NFS, FUSE) does not matter.

A lock lives until the last descriptor of its open file description is closed, and `fork` copies descriptors: a
DataLoader worker forked from a reader would keep the lease of a reader that was killed. So every descriptor of this
package is an `OwnedFd`, closed in the child by `os.register_at_fork`; `exec` closes them through O_CLOEXEC.
"""

import errno
import fcntl
import os
import stat
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

from async_grpo_ipc.errors import ExporterAliveError, ForkedError, HandleFileError

OWNER_BYTE = 0  # exclusively held by the exporter as long as it lives
ATTACHED_BYTE = 1  # held shared by every reader as long as it maps the memory
FIRST_SLOT_BYTE = 16  # slot i is byte 16 + i: shared while read, exclusive while written

_NOT_ITS_FAULT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_FLAGS, _PF_EXITING = 6, 0x4  # of /proc/PID/stat, counted behind the name; linux/sched.h

_FLOCK = struct.Struct("hhqqi0q")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class OwnedFd:
    """A descriptor owned by one process: closed on `close()`, on collection, and in every forked child."""

    def __init__(self, fd: int, what: str) -> None:
        self._fd: int | None = fd
        self._what = what
        self._pid = os.getpid()
        _owned.add(self)

    def fileno(self) -> int:
        if self._fd is None:
            if os.getpid() != self._pid:
                raise ForkedError(
                    f"{self._what} was opened by process {self._pid} and this is its forked child "
                    f"{os.getpid()}, which does not inherit it. Open the handle again in this process."
                )
            raise ValueError(f"{self._what} is closed.")
        return self._fd

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


_owned: "weakref.WeakSet[OwnedFd]" = weakref.WeakSet()


def _close_all_in_child() -> None:
    for owned in list(_owned):
        owned.close()


os.register_at_fork(after_in_child=_close_all_in_child)


class LockFile:
    """The byte locks of one opened file. Opening the file again gives an independent holder."""

    def __init__(self, path: str, *, writable: bool, what: str) -> None:
        mode = os.O_RDWR if writable else os.O_RDONLY
        self._fd = OwnedFd(os.open(path, mode | os.O_CLOEXEC), what)
        opened = os.fstat(self._fd.fileno())
        self._device, self.inode = opened.st_dev, opened.st_ino

    def try_lock(self, byte: int, *, shared: bool = False) -> bool:
        """Hold this byte, alone or with others; False if another opened file is in the way.

        Raises:
            ForkedError: this is a forked child of the process that opened the file.
        """
        request = _FLOCK.pack(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(self._fd.fileno(), fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, byte: int) -> None:
        if self._fd.is_open:  # in a forked child it is closed, and the lock is the parent's
            request = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)
            fcntl.fcntl(self._fd.fileno(), fcntl.F_OFD_SETLK, request)

    def held_elsewhere(self, byte: int) -> bool:
        """Whether another opened file holds this byte."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self._fd.fileno(), fcntl.F_OFD_GETLK, request)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def holders(self, byte: int, among: Sequence[int] | None = None) -> list[int]:
        """Pids (of `among`, or of all) that hold this byte, as far as /proc may be read: for messages, never for
        decisions."""
        pids = among
        if pids is None:
            pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        return sorted(pid for pid in pids if _holds(pid, self._device, self.inode, byte))

    def close(self) -> None:
        self._fd.close()


class OwnerLock:
    """One exporter a path: held for an exporter's life through a file next to the handle file.

    The file stays behind with the last owner's pid in it; the lock ends with its owner.
    """

    def __init__(self, handle: Path) -> None:
        handle.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = handle.with_name(f"{handle.stem}.owner.lock")
        fd = open_regular(path, os.O_CREAT | os.O_RDWR)
        try:
            self._locks = LockFile(f"/proc/self/fd/{fd}", writable=True, what=f"exporter at {handle}")
            if not self._locks.try_lock(OWNER_BYTE):
                self._locks.close()
                owner = os.pread(fd, 20, 0).decode("ascii", errors="replace")
                raise ExporterAliveError(
                    f"A live exporter (pid {owner if owner.isdigit() else 'unknown'}) already publishes "
                    f"at {handle}. Stop it, or publish at another path."
                )
            note = str(os.getpid()).encode()
            os.pwrite(fd, note, 0)
            os.ftruncate(fd, len(note))
        finally:
            os.close(fd)
        self._pid = os.getpid()
        self.closed = False

    @property
    def is_own(self) -> bool:
        """False in a forked child, which must not withdraw its parent's files."""
        return self._pid == os.getpid()

    def close(self) -> None:
        self.closed = True
        self._locks.close()


def is_exiting(pid: int) -> bool:
    """Whether this process is gone, or the kernel has begun to take it apart (its main thread has PF_EXITING)."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return True
    return bool(int(after_name.split()[_FLAGS]) & _PF_EXITING)


def _holds(pid: int, device: int, inode: int, byte: int) -> bool:
    try:
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            found = opened.stat()
            if (found.st_dev, found.st_ino) == (device, inode) and byte in _locked_bytes(pid, opened.name):
                return True
    except OSError:
        return False  # it ended meanwhile, or belongs to someone else
    return False


def _locked_bytes(pid: int, fd: str) -> list[int]:
    """First bytes of the locks in fdinfo: `lock: 1: OFDLCK ADVISORY READ -1 00:01:2 16 16`."""
    lines = Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
    return [int(line.split()[-2]) for line in lines if line.startswith("lock:")]


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file: waits for no pipe, follows no link. `HandleFileError` says what else it is."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise HandleFileError(
            f"{path} does not exist: no exporter has published there yet, or it has ended."
        ) from error
    except OSError as error:
        if error.errno in _NOT_ITS_FAULT:
            raise
        why = "it is a link, and links are not followed" if error.errno == errno.ELOOP else error.strerror
        raise HandleFileError(f"{path} cannot be opened: {why}. Find out which process put it there.") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise HandleFileError(f"{path} is not a regular file. Find out which process put it there.")
    return fd
