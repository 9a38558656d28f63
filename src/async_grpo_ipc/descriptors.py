"""File descriptors that a forked child does not keep.

A lock taken through an open file description lives until its last descriptor is closed, and `fork` copies
descriptors: a DataLoader worker forked from a reader would keep the reader's lease after the reader was
killed. So every descriptor of this package is closed in the child, by `os.register_at_fork`; `exec` closes
them through O_CLOEXEC.
"""

import os
import weakref

from async_grpo_ipc.errors import ForkedError


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
