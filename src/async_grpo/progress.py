"""Tells a slow worker from a hung one by the counter that it moves while it works.

Only *changes* mean anything, timed on the watcher's own monotonic clock: no time stamps, no clocks to compare.
"""

from __future__ import annotations

import time
from pathlib import Path

from async_grpo.activity import activity_file, read_count


class StallWatch:
    """The watcher's side, for one worker.

    Args:
        timeout_s: so long without any progress, while it has a job, means hung.
    """

    def __init__(self, root: Path, device: int, timeout_s: float) -> None:
        self.device = device
        self._queue = root / "queue"
        self._claims = f"*_processing_by_dev{device}.safetensors"
        self._file = activity_file(root, f"dev{device}")
        self._timeout_s = timeout_s
        self._seen: bytes | None = None
        self._since = time.monotonic()

    def count(self) -> bytes | None:
        """What the worker, or an earlier one of its number, has counted so far."""
        return read_count(self._file)

    def is_hung(self) -> bool:
        """Look once. A worker without a job is idle, not hung, whatever its counter says."""
        now = time.monotonic()
        count = self.count()
        if count != self._seen or not any(self._queue.glob(self._claims)):
            self._seen, self._since = count, now
        return now - self._since > self._timeout_s
