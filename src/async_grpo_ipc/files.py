"""Opens files that lie where others may have put something else."""

import errno
import os
import stat
from pathlib import Path

from async_grpo_ipc.errors import HandleFileError

_NOT_ITS_FAULT = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


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
