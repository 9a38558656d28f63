"""Counts of one worker, for the line that it logs when it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Spread:
    """Minimum, mean and maximum of what was added, in constant memory: a worker may run for weeks."""

    count: int = 0
    total: float = 0.0
    min: float = float("inf")
    max: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.min = min(self.min, value)
        self.max = max(self.max, value)

    def __str__(self) -> str:
        return f"{self.min:.4f}/{self.total / self.count:.4f}/{self.max:.4f}"


@dataclass(slots=True)
class WorkerStatistics:
    """Counts jobs and keeps the spread of each phase, in seconds."""

    jobs: int = 0
    failed: int = 0
    generation: Spread = field(default_factory=Spread)  # of groups
    scoring: Spread = field(default_factory=Spread)
    adoption: Spread = field(default_factory=Spread)  # of new weights
    _started: float = field(default_factory=time.monotonic)

    def report(self) -> str:
        """`42 jobs (1 failed), 3.1 jobs/s; generation 0.10/0.12/0.31 s, … (min/mean/max)`."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        failed = f" ({self.failed} failed)" if self.failed else ""
        phases = {"generation": self.generation, "scoring": self.scoring, "weight adoption": self.adoption}
        spreads = [f"{name} {spread} s" for name, spread in phases.items() if spread.count]
        tail = f"; {', '.join(spreads)} (min/mean/max)" if spreads else ""
        return f"{self.jobs} jobs{failed}, {self.jobs / elapsed:.2f} jobs/s{tail}"
