"""What an experiment says: in `run.log`, and on the terminal: a row for each job, or how many are in which state."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from async_grpo.rundir.files import LineFile
from async_grpo_experiments.slots.screen import QueueScreen, drawn, stamped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NAME = "experiment"
RUN_LOG = "run.log"
COLUMNS = ("job", "state", "running", "took")
JobRows: TypeAlias = Callable[[], Iterator[tuple[str, str, str, str]]]


class ExperimentScreen(QueueScreen):
    """A row for each job. What is said is also noted.

    Args:
        jobs: gives rows of `COLUMNS`.
        note: takes each line that is said.
        gpus: sums up what all GPUs do; empty: nothing is known.
    """

    def __init__(
        self,
        jobs: JobRows,
        note: Callable[[str], None],
        console: Console | None = None,
        gpus: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(NAME, console)
        self._jobs, self._note, self._gpus = jobs, note, gpus

    def say(self, text: str) -> None:
        super().say(text)
        self._note(text)

    def line(self) -> str:
        rows = list(self._jobs())
        states = Counter(state.partition(" ")[0] for _, state, _, _ in rows)
        running = "; ".join(f"{job}: {doing}" for job, _, doing, _ in rows if doing)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        return " | ".join(filter(None, [counts, running, self._gpus()]))

    def table(self) -> Table:
        found = drawn(COLUMNS, self._jobs(), right={"took"})
        found.caption = self._gpus()
        return found


class ExperimentLog(LineFile):
    """`run.log` of an experiment."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / RUN_LOG)

    def say(self, text: str) -> None:
        """Print a line, and note it."""
        print(stamped(NAME, text), flush=True)
        self.note(text)

    def note(self, text: str) -> None:
        """Write a line to the file alone."""
        self.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
