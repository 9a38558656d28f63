"""What the terminal shows of a queue: a table of it that stays, or one line a minute where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from async_grpo.formatting import printable
from async_grpo.launch.screen import live_console

if TYPE_CHECKING:
    from rich.table import Table

TABLE_EVERY_S, LINE_EVERY_S = 2.0, 60.0
_TEXTS = ("job", "place", "state", "running")  # columns that are aligned to the left


class QueueScreen:
    """Lines of `name` scroll; on a terminal the table stays under them for as long as the `with` block lasts.

    Args:
        rows: gives rows of `columns`, as the queue is now.
        line: gives the queue in one line.
        note: takes each text that is said.
        caption: gives what stands under the table.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        rows: Callable[[], Iterable[Sequence[str]]],
        line: Callable[[], str],
        *,
        note: Callable[[str], None] = lambda text: None,
        caption: Callable[[], str] = lambda: "",
    ) -> None:
        self._name, self._columns, self._rows, self._line = name, columns, rows, line
        self._note, self._caption, self._console = note, caption, live_console()
        self._every_s = LINE_EVERY_S if self._console is None else TABLE_EVERY_S
        self._next_look = time.monotonic() + self._every_s
        if self._console is not None:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        if self._console is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._console is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line with its time, above the table where there is one, and note it."""
        line = stamped(self._name, text)
        if self._console is None:
            print(line, flush=True)
        else:
            from rich.text import Text

            self._console.print(Text(line), soft_wrap=True)
        self._note(text)

    def look(self) -> None:
        """Show the queue, if it is time to. Called often."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + self._every_s
        if self._console is None:
            self.say(self._line())
        else:
            self._live.update(self.table(), refresh=True)

    def table(self) -> Table:
        """The queue as it is now."""
        from rich.table import Table

        found = Table(expand=False, caption=self._caption())
        for column in self._columns:
            found.add_column(column, justify="left" if column in _TEXTS else "right", no_wrap=True)
        for row in self._rows():
            found.add_row(*row)
        return found


def stamped(name: str, text: str) -> str:
    """A line for a terminal: whose it is, and when it was said."""
    return printable(f"[{name}] {time.strftime('%H:%M:%S')} {text}")
