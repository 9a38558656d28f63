"""One exporter a path: the lock beside the handle file."""

import os
from pathlib import Path

from async_grpo_ipc.errors import ExporterAliveError
from async_grpo_ipc.handle_file import owner_lock_path
from async_grpo_ipc.leases import OWNER_BYTE, LockFile


class OwnerLock:
    """Held for the life of an exporter. Its file stays behind, empty but for the last owner's pid; the lock
    does not.
    """

    def __init__(self, handle: Path) -> None:
        handle.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = owner_lock_path(handle)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        self._locks = LockFile(str(path), writable=True, what=f"exporter at {handle}")
        if not self._locks.try_exclusive(OWNER_BYTE):
            self._locks.close()
            raise ExporterAliveError(
                f"A live exporter (pid {path.read_text(encoding='ascii') or 'unknown'}) already publishes "
                f"at {handle}. Stop it, or publish at another path."
            )
        path.write_text(str(os.getpid()), encoding="ascii")
        self._pid = os.getpid()
        self.closed = False

    @property
    def is_own(self) -> bool:
        """False in a forked child, which must not withdraw its parent's files."""
        return self._pid == os.getpid()

    def close(self) -> None:
        self.closed = True
        self._locks.close()
