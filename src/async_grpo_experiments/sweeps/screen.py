"""What the terminal shows of a sweep: a row, or some words, for each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from async_grpo.formatting import eta
from async_grpo_experiments.slots.ledger import RUNNING, WAITING, Record
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.screen import QueueScreen, drawn
from async_grpo_experiments.sweeps.plan import Run, Sweep
from async_grpo_experiments.sweeps.progress import Progress, progress_of
from async_grpo_experiments.sweeps.usage import Usage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLUMNS = ("seed", "place", "state", "step", "reward", "evaluated reward", "rollouts/s", "use", "ETA")


class SweepScreen(QueueScreen):
    """A row for each run."""

    def __init__(
        self,
        sweep: Sweep,
        records: Mapping[str, Record],
        places: Sequence[Place],
        console: Console | None = None,
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
