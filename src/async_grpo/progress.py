"""A counter that a worker moves while it works, so that who watches it can tell slow from hung.

Only *changes* mean anything, timed on the watcher's own monotonic clock: no time stamps, no clocks to compare.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

_COUNTER = struct.Struct("<Q")


def progress_file(root: Path, device: int) -> Path:
    """Where worker dev{device} of the run in `root` counts."""
    return root / "alive" / f"dev{device}.progress"


class Progress:
    """The worker's side: eight bytes in a file that is mapped, so that counting costs no system call."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _COUNTER.size)
            self._map = mmap.mmap(descriptor, _COUNTER.size)
        finally:
            os.close(descriptor)
        (self._count,) = _COUNTER.unpack(self._map[:])

    def tick(self) -> None:
        """Something was done: a token was decoded, a group scored, a file written."""
        self._count += 1
        self._map[:] = _COUNTER.pack(self._count)


class StallWatch:
    """The watcher's side, for one worker.

    Args:
        timeout_s: so long without any progress, while it has a job, means hung.
    """

    def __init__(self, root: Path, device: int, timeout_s: float) -> None:
        self._queue = root / "queue"
        self._claims = f"*_processing_by_dev{device}.safetensors"
        self._file = progress_file(root, device)
        self._timeout_s = timeout_s
        self._seen: bytes | None = None
        self._since = time.monotonic()

    def count(self) -> bytes | None:
        """What the worker, or an earlier one of its number, has counted so far."""
        return self._file.read_bytes() if self._file.exists() else None

    def is_hung(self) -> bool:
        """Look once. A worker without a job is idle, not hung, whatever its counter says."""
        now = time.monotonic()
        count = self.count()
        if count != self._seen or not any(self._queue.glob(self._claims)):
            self._seen, self._since = count, now
        return now - self._since > self._timeout_s
