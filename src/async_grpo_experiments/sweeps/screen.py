"""What the terminal shows of a sweep: a table of all runs that stays, or one line a minute where there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from async_grpo.formatting import eta
from async_grpo.launch.screen import live_console
from async_grpo_experiments.slots.ledger import RUNNING, WAITING, Record
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.sweeps.plan import Run, Sweep
from async_grpo_experiments.sweeps.progress import Progress, progress_of
from async_grpo_experiments.sweeps.usage import Usage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TABLE_EVERY_S = 2.0
LINE_EVERY_S = 60.0
COLUMNS = ("seed", "place", "state", "step", "reward", "evaluated reward", "rollouts/s", "use", "ETA")


class SweepScreen:
    """Plain lines, for logs and pipes. `look` is called often."""

    every_s = LINE_EVERY_S

    def __init__(self, sweep: Sweep, records: Mapping[str, Record], places: Sequence[Place]) -> None:
        self._runs, self._records = sweep.runs, records
        self._gpus = {place.name: place.gpus for place in places}
        self._usage = Usage()
        self._next_look = 0.0

    def __enter__(self) -> Self:
        self._next_look = time.monotonic() + self.every_s
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def say(self, text: str) -> None:
        print(f"[sweep] {time.strftime('%H:%M:%S')} {text}", flush=True)

    def look(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self.every_s
            self._show()

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row of `COLUMNS` for each run."""
        for run in self._runs:
            record = self._records.get(run.name, Record(task=run.name, state=WAITING))
            yield _row(run, record, self._usage, self._gpus)

    def _show(self) -> None:
        self.say(" | ".join(_in_words(row) for row in self.rows()))


class TableScreen(SweepScreen):
    """A terminal: lines scroll, and the table stays under them."""

    every_s = TABLE_EVERY_S

    def __init__(self, sweep: Sweep, records: Mapping[str, Record], places: Sequence[Place], console: Console) -> None:
        super().__init__(sweep, records, places)
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(f"[sweep] {time.strftime('%H:%M:%S')} {text}"), soft_wrap=True)

    def _show(self) -> None:
        self._live.update(table(self.rows()), refresh=True)


def open_screen(sweep: Sweep, records: Mapping[str, Record], places: Sequence[Place]) -> SweepScreen:
    """A table where standard output is a terminal that can move its cursor, else lines."""
    console = live_console()
    return SweepScreen(sweep, records, places) if console is None else TableScreen(sweep, records, places, console)


def table(rows: Iterator[tuple[str, ...]]) -> Table:
    from rich.table import Table

    drawn = Table(expand=False)
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column in ("place", "state") else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return drawn


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
