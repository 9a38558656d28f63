"""What a worker did, for the line that it prints at its end."""

from __future__ import annotations

import statistics
import time


class WorkerStatistics:
    """Counts jobs and keeps the time of every batch's phases, in seconds."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.jobs = 0
        self.failed = 0
        self.times: dict[str, list[float]] = {"generation": [], "scoring": [], "weight adoption": []}

    def add(self, phase: str, seconds: float) -> None:
        self.times[phase].append(seconds)

    def report(self) -> str:
        """`42 jobs (1 failed), 3.1 jobs/s; generation 0.10/0.12/0.31 s, … (min/median/max)`."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        failed = f" ({self.failed} failed)" if self.failed else ""
        phases = [f"{name} {_spread(times)} s" for name, times in self.times.items() if times]
        tail = f"; {', '.join(phases)} (min/median/max)" if phases else ""
        return f"{self.jobs} jobs{failed}, {self.jobs / elapsed:.2f} jobs/s{tail}"


def _spread(times: list[float]) -> str:
    return f"{min(times):.4f}/{statistics.median(times):.4f}/{max(times):.4f}"
