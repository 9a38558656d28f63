"""`<stem>_version.json`: what is published, for people who `watch cat` it. Readers of weights use the shared
header.
"""

import logging
import os
import time
from pathlib import Path

from async_grpo_ipc.descriptors import OwnedFd
from async_grpo_ipc.handle_file import replace_whole

logger = logging.getLogger(__name__)

FILE_BYTES = 160  # padded with spaces: every version is one write of the same length, in place


class VersionFile:
    """Created whole with the first version, then overwritten in place: 3 us, where a rename costs a
    millisecond on a disk.
    """

    def __init__(self, path: Path, generation: str) -> None:
        self._path = path
        self._generation = generation
        self._fd: OwnedFd | None = None

    def show(self, version: int) -> None:
        """Write the version. A full disk is worth a warning, not the end of a training run."""
        body = f'{{"global_step": {version}, "timestamp": {time.time()}, "generation": "{self._generation}"}}'
        line = body.ljust(FILE_BYTES - 1) + "\n"
        try:
            if self._fd is None:
                replace_whole(self._path, line.encode("ascii"))
                self._fd = OwnedFd(os.open(self._path, os.O_WRONLY | os.O_CLOEXEC), str(self._path))
            else:
                os.pwrite(self._fd.fileno(), line.encode("ascii"), 0)
        except OSError as error:
            logger.warning("Version %d is published, but %s could not be written: %s.", version, self._path, error)

    def close(self) -> None:
        if self._fd is not None:
            self._fd.close()
