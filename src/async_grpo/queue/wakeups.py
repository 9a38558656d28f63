"""What wakes workers and the server: a named pipe with the names of new jobs, and watches of directories.

The server, of which there is one, watches directories. If idle workers did, every rename would wake all of them, three
times a job, for one of them to have it. So the process that makes a job pending also writes its name into the pipe.
That wakes one worker (EPOLLEXCLUSIVE), which finds the job without a listing.

The pipe is only a hint. A name may be stale; it may be lost with a worker that was killed after reading it; a file
that is moved by hand is not announced. So a worker looks at the directory when the pipe is empty, and regularly even if
it is not. The pipe may be deleted at any time.
"""

from __future__ import annotations

import ctypes
import os
import select
import stat
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

BLIND_LOOK_S = 0.02  # between looks at the directory on a disk that has no pipes

EVERYTHING = 1 << 16  # more names than a pipe holds

_RECORD = 16  # bytes: a name, spaces, a newline


class JobPipe:
    """The pipe of the queue in `root`, for any number of writers and readers; none of the methods fails.

    Each worker of each process opens its own. A name has at most 15 characters and no spaces.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "tmp" / "jobs.pipe"
        self._fd = -1
        self._sleep: select.epoll | None = None
        self._open()

    def announce(self, names: Iterable[str]) -> None:
        """Wake one sleeping worker for each of these names. A full pipe, with 4,096 names, takes no more."""
        self._open()
        if self._fd >= 0:
            with suppress(OSError):
                for name in names:  # one by one, as the kernel wakes one sleeper a write
                    os.write(self._fd, f"{name:<15}\n".encode())

    def take(self, at_most: int) -> list[str]:
        """Names that no other worker has taken, in the order in which they were announced; they may be stale."""
        if self._fd < 0:
            return []
        try:
            return os.read(self._fd, at_most * _RECORD).decode(errors="replace").split()
        except OSError:
            return []

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is a name to take. False after `timeout_s`, or earlier where there is no pipe."""
        self._open()
        if self._fd < 0:
            time.sleep(min(timeout_s, BLIND_LOOK_S))
            return False
        if self._sleep is None:
            self._sleep = select.epoll()
            self._sleep.register(self._fd, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        return bool(self._sleep.poll(timeout_s))

    def close(self) -> None:
        if self._sleep is not None:
            self._sleep.close()
            self._sleep = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Have the pipe open, and make it where it is missing.

        Processes that started after the pipe was deleted have another. A disk that was full may have space now. A file
        of another kind or another user at its path is not used.
        """
        if self._fd >= 0 and os.fstat(self._fd).st_nlink:
            return
        self.close()
        with suppress(OSError):
            with suppress(FileExistsError):
                os.mkfifo(self._path, 0o600)
            # for both, so that neither opening it nor writing waits for anybody
            self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(self._fd)
            if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
                self.close()


IN_MODIFY, IN_MOVED_TO, IN_CREATE = 0x2, 0x80, 0x100
_IN_Q_OVERFLOW, _IN_UNMOUNT, _IN_IGNORED, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x4000, 0x2000, 0x8000, 0x400, 0x800
_BLINDING = _IN_Q_OVERFLOW | _IN_UNMOUNT | _IN_IGNORED | _IN_DELETE_SELF | _IN_MOVE_SELF
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows

BLIND_RESCAN_S = 0.02  # between looks without inotify


@dataclass(slots=True)
class Woken:
    """What a wait ended with."""

    names: list[str] = field(default_factory=list)  # files that changed, as events gave them
    ready: list[int] = field(default_factory=list)  # descriptors of `also` that became readable
    look: bool = False  # events may be missing: list the directory yourself


class DirectoryWatch:
    """Watch directories for `{path: mask}`; events that come between two waits are kept for the next."""

    def __init__(self, masks: Mapping[Path, int]) -> None:
        self._fd = _inotify(masks)

    @property
    def blind(self) -> bool:
        """Whether the kernel gave no inotify, so that every wait is a short sleep."""
        return self._fd < 0

    def wait(self, timeout_s: float, also: Iterable[int] = ()) -> Woken:
        """Sleep until something changes, a descriptor of `also` is readable, or the time is over."""
        poll = select.poll()
        others = list(also)
        for fd in others if self.blind else (self._fd, *others):
            poll.register(fd, select.POLLIN)
        limit_s = min(timeout_s, BLIND_RESCAN_S) if self.blind else timeout_s
        ready = [fd for fd, _ in poll.poll(max(0, -int(-limit_s * 1000 // 1)))]
        woken = Woken(ready=[fd for fd in ready if fd != self._fd], look=self.blind)
        if self._fd in ready:
            self._read(woken)
        return woken

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, woken: Woken) -> None:
        try:
            events = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        at = 0
        while at < len(events):
            _, mask, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size + length
            if mask & _BLINDING:
                woken.look = True
            elif length:
                woken.names.append(os.fsdecode(events[at - length : at].rstrip(b"\0")))


def _inotify(masks: Mapping[Path, int]) -> int:
    """A descriptor that watches every directory, or -1 when the kernel gives none."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except AttributeError:  # a C library without inotify
        return -1
    for path, mask in masks.items():
        if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(path), mask | _IN_DELETE_SELF | _IN_MOVE_SELF) < 0:
            os.close(fd)
            fd = -1
    return fd


def sleep_until(deadline: float, at_most_s: float) -> float:
    """Seconds that a wait may still last: up to `at_most_s`, never past the (monotonic) deadline."""
    return max(0.0, min(deadline - time.monotonic(), at_most_s))
