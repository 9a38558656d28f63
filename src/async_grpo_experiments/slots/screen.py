"""What the terminal shows of a queue: a table of it that stays, or one line a minute where there is no terminal."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

from async_grpo.formatting import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TABLE_EVERY_S = 2.0
LINE_EVERY_S = 60.0


class QueueScreen(ABC):
    """Lines of `name` scroll; on a terminal the table stays under them for as long as the `with` block lasts."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self._name, self._console = name, console
        self._every_s = LINE_EVERY_S if console is None else TABLE_EVERY_S
        self._next_look = 0.0
        if console is not None:
            from rich.live import Live

            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        if self._console is not None:
            self._live.start()
        self._next_look = time.monotonic() + self._every_s
        return self

    def __exit__(self, *exc: object) -> None:
        if self._console is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line with its time, above the table where there is one."""
        line = stamped(self._name, text)
        if self._console is None:
            print(line, flush=True)
            return
        from rich.text import Text

        self._console.print(Text(line), soft_wrap=True)

    def look(self) -> None:
        """Show the queue, if it is time to. Called often."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + self._every_s
        if self._console is None:
            self.say(self.line())
        else:
            self._live.update(self.table(), refresh=True)

    @abstractmethod
    def line(self) -> str:
        """The queue in one line."""

    @abstractmethod
    def table(self) -> Table:
        """The queue as it is now."""


def stamped(name: str, text: str) -> str:
    """A line for a terminal: whose it is, and when it was said."""
    return printable(f"[{name}] {time.strftime('%H:%M:%S')} {text}")


def drawn(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str]) -> Table:
    """A table; the columns `right` are aligned to the right."""
    from rich.table import Table

    found = Table(expand=False)
    for column in columns:
        found.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found
