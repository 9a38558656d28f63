"""What the terminal shows of an experiment: a table of all jobs, or a line a minute where there is no terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self, TypeAlias

from async_grpo.formatting import printable
from async_grpo.launch.screen import live_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TABLE_EVERY_S = 2.0
LINE_EVERY_S = 60.0
COLUMNS = ("job", "state", "running", "took")
JobRows: TypeAlias = Callable[[], Iterator[tuple[str, str, str, str]]]


class ExperimentScreen:
    """Plain lines, for logs and pipes. `look` is called often."""

    every_s = LINE_EVERY_S
    is_live = False

    def __init__(self, jobs: JobRows, say: Callable[[str], None]) -> None:
        self._jobs, self._say = jobs, say
        self._next_look = 0.0

    def __enter__(self) -> Self:
        self._next_look = time.monotonic() + self.every_s
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def look(self) -> None:
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + self.every_s
            self._show()

    def say_with(self, note: Callable[[str], None]) -> Callable[[str], None]:
        """What says a sentence here and notes it there."""
        return self._say

    def _show(self) -> None:
        rows = list(self._jobs())
        states = Counter(state.partition(" ")[0] for _, state, _, _ in rows)
        running = "; ".join(f"{job}: {doing}" for job, _, doing, _ in rows if doing)
        self._say(
            ", ".join(f"{count} {state}" for state, count in states.items()) + (f" | {running}" if running else "")
        )


class JobTableScreen(ExperimentScreen):
    """A terminal: lines scroll, and the table stays under them."""

    every_s = TABLE_EVERY_S
    is_live = True

    def __init__(self, jobs: JobRows, say: Callable[[str], None], console: Console) -> None:
        super().__init__(jobs, say)
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def say_with(self, note: Callable[[str], None]) -> Callable[[str], None]:
        from rich.text import Text

        def say(text: str) -> None:
            note(text)
            self._console.print(Text(printable(f"[experiment] {time.strftime('%H:%M:%S')} {text}")), soft_wrap=True)

        return say

    def _show(self) -> None:
        self._live.update(job_table(self._jobs()), refresh=True)


def open_screen(jobs: JobRows, say: Callable[[str], None]) -> ExperimentScreen:
    """A table where standard output is a terminal that can move its cursor, else lines."""
    console = live_console()
    return ExperimentScreen(jobs, say) if console is None else JobTableScreen(jobs, say, console)


def job_table(rows: Iterator[tuple[str, str, str, str]]) -> Table:
    from rich.table import Table

    drawn = Table(expand=False)
    for column in COLUMNS:
        drawn.add_column(column, justify="right" if column == "took" else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return drawn
