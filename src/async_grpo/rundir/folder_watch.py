"""Whether a run directory is still where it was when the process began, and can still be written to."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_grpo.errors import QueueError, RunDirError
from async_grpo.rundir.paths import RunDir


class FolderWatch:
    """The run directory at `root`, as it is now, to be compared with later."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._identity = _identity(self._root)
        self._state = RunDir(root).state_file
        self._had_state = self._state.exists()

    def trouble(self) -> str:
        """Why the run cannot continue here, in a sentence; empty if the directory is as it was."""
        now = _identity(self._root)
        if now is None:
            return (
                f"{self._root} was renamed or deleted while the run was going on. If it has another name now, continue "
                "with --run-dir THAT_NAME --resume."
            )
        if now != self._identity:
            return (
                f"Another directory has taken the place of {self._root} while the run was going on. If the run has "
                "another name now, continue with --run-dir THAT_NAME --resume."
            )
        if self._had_state and not self._state.exists():
            return (
                f"Files of {self._root} were deleted while the run was going on, so it cannot continue. Its "
                "checkpoints are in the output_dir of the setup file."
            )
        if _is_read_only(self._root):
            return (
                f"The file system of {self._root} has become read-only, so the run cannot continue. The kernel's log "
                "(dmesg) says why. Repair or remount it, then continue with --resume."
            )
        return ""

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise `RunDirError` with the cause where the block fails because the directory is gone or read-only."""
        try:
            yield
        except (OSError, QueueError, RunDirError) as error:
            if trouble := self.trouble():
                raise RunDirError(trouble) from error
            raise


def _is_read_only(root: Path) -> bool:
    """Also where only trying tells: after an error ext4 refuses to write, and is still mounted for writing."""
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        return True
    try:
        os.close(os.open(root, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))  # a file without a name
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def _identity(root: Path) -> tuple[int, int] | None:
    try:
        status = root.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino
