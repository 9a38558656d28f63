"""What the terminal shows of a sweep: a row, or some words, for each run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import psutil

from async_grpo.formatting import eta
from async_grpo_experiments.slots.gpu_driver import mean_percent
from async_grpo_experiments.slots.ledger import RUNNING, WAITING, Record
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.screen import QueueScreen, drawn
from async_grpo_experiments.sweeps.plan import Run, Sweep
from async_grpo_experiments.sweeps.progress import Progress, progress_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLUMNS = ("seed", "place", "state", "step", "reward", "evaluated reward", "rollouts/s", "use", "ETA")


class SweepScreen(QueueScreen):
    """A row for each run."""

    def __init__(
        self, sweep: Sweep, records: Mapping[str, Record], places: Sequence[Place], console: Console | None = None
    ) -> None:
        super().__init__("sweep", console)
        self._runs, self._records = sweep.runs, records
        self._gpus = {place.name: place.gpus for place in places}
        self._usage = Usage()

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row of `COLUMNS` for each run."""
        for run in self._runs:
            record = self._records.get(run.name, Record(task=run.name, state=WAITING))
            yield _row(run, record, self._usage, self._gpus)

    def line(self) -> str:
        return " | ".join(_in_words(row) for row in self.rows())

    def table(self) -> Table:
        return table(self.rows())


def table(rows: Iterator[tuple[str, ...]]) -> Table:
    return drawn(COLUMNS, rows, right={*COLUMNS} - {"place", "state"})


def _row(run: Run, record: Record, usage: Usage, gpus: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    if record.state == WAITING:
        return (str(run.seed), "", WAITING, *[""] * (len(COLUMNS) - 3))
    found = progress_of(run)
    running = record.state == RUNNING
    return (
        str(run.seed),
        record.place,
        found.state if running else record.state,
        _step(found),
        _figure(found.reward),
        _figure(found.evaluation),
        "" if not running or found.rollouts_per_second is None else f"{found.rollouts_per_second:.0f}",
        usage.of(run.name, (record.pid, *found.pids), gpus.get(record.place, ())) if running else "",
        eta(found.eta_s) if running and found.eta_s is not None else "",
    )


def _step(found: Progress) -> str:
    return f"{found.step}/{found.total_steps}" if found.total_steps else str(found.step)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _in_words(row: tuple[str, ...]) -> str:
    """`seed 42: training, step 40/100, reward 0.931, ETA 12 s`."""
    named = dict(zip(COLUMNS, row, strict=True))
    parts = [f"{name} {named[name]}" for name in COLUMNS[3:] if named[name]]
    return f"seed {named['seed']}: {', '.join([named['state'], *parts])}"


class _Spent(NamedTuple):
    at: float  # monotonic
    cpu_s: float


class Usage:
    """Cores and GPUs in use by the runs of a sweep. Nothing here waits."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: dict[str, _Spent] = {}  # by run

    def of(self, run: str, pids: Sequence[int], gpus: Sequence[str]) -> str:
        """`GPU 87%`, or `1.8 cores` of a run without GPUs; empty at the first look."""
        if not gpus:
            return self._cores(run, pids)
        percent = mean_percent(gpus)
        return "" if percent is None else f"GPU {percent:.0f}%"

    def _cores(self, run: str, pids: Sequence[int]) -> str:
        spent, before = _Spent(self._now(), sum(map(_cpu_s, pids))), self._last.get(run)
        self._last[run] = spent
        if before is None or spent.cpu_s < before.cpu_s or spent.at <= before.at:
            return ""
        return f"{(spent.cpu_s - before.cpu_s) / (spent.at - before.at):.1f} cores"


def _cpu_s(pid: int) -> float:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
