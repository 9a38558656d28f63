"""Names of new jobs, told to whichever worker is free: a named pipe beside the queue.

A directory can be watched, but then every rename in it wakes every idle worker, three times a job, for one of
them to have it. Whoever makes a job pending writes its name into the pipe as well: that wakes one worker
(EPOLLEXCLUSIVE), which need not list the directory to find the job, and tries no job that another one has.

The pipe only ever says where to look. A name may be stale, be lost with a worker that was killed while it had
read it, or never have been written, by a person who moved a file by hand. So a worker looks at the directory when
the pipe is empty, and once in a while although it is not; and the pipe may be deleted at any time.
"""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
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
        """Wake a sleeper for each of these. A pipe that is full, with 4,096, is told no more."""
        self._mend()
        if self._fd >= 0:
            with suppress(OSError):
                for name in names:  # one by one, as the kernel wakes one sleeper a write
                    os.write(self._fd, f"{name:<15}\n".encode())

    def take(self, at_most: int) -> list[str]:
        """Names that nobody else has taken, as they were announced; they may be stale."""
        if self._fd < 0:
            return []
        try:
            return os.read(self._fd, at_most * _RECORD).decode(errors="replace").split()
        except OSError:
            return []

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there is a name to take. False when the time is over, or earlier where there is no pipe."""
        self._mend()
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
        """Make or find the pipe. What is there and is no pipe of ours is not used."""
        with suppress(OSError):
            with suppress(FileExistsError):
                os.mkfifo(self._path, 0o600)
            # for both, so that neither opening it nor writing waits for anybody
            self._fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(self._fd)
            if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
                self.close()

    def _mend(self) -> None:
        """If somebody deleted the pipe, those who started since then have another; a full disk may have room now."""
        if self._fd < 0 or os.fstat(self._fd).st_nlink == 0:
            self.close()
            self._open()
