"""What a command does around a queue that it runs: it has the folder alone, signals stop it, it gives a code.

Meanwhile the terminal shows a table of the queue that stays, or one line a minute where there is no terminal.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from async_grpo.errors import RunDirError
from async_grpo.formatting import printable
from async_grpo.launch.screen import live_console
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import KernelLock, describe_holder
from async_grpo.rundir.summary import program
from async_grpo.setup.output import survive_lost_output
from async_grpo_experiments.slots.ledger import BLOCKED, FAILED, FINISHED, Record

if TYPE_CHECKING:
    from rich.table import Table

TABLE_EVERY_S, LINE_EVERY_S = 2.0, 60.0
_TEXTS = ("job", "place", "state", "running")  # columns that are aligned to the left


@contextmanager
def held_alone(lock_file: Path, *, role: str, way_out: str) -> Iterator[None]:
    """Make the folder of this file, and let one process at a time have it. `RunDirError` names the one that has it."""
    survive_lost_output()
    lock_file.parent.parent.mkdir(parents=True, exist_ok=True)
    make_folder(lock_file.parent)
    lock = KernelLock(lock_file)
    if not lock.try_acquire({"role": role}):
        raise RunDirError(
            f"{lock_file.parent} is in use by another {role} ({describe_holder(lock.holder())}). {way_out}"
        )
    with lock:
        yield


def stopped_by_signals(stop: Callable[..., object]) -> ExitStack:
    """Have SIGINT and SIGTERM call `stop` to the end of the process; where this is a block's, to the end of the block.

    A command keeps it to its end: a signal behind its last line would end it, with another code, when all is done.
    """
    before = ExitStack()
    for number in (signal.SIGINT, signal.SIGTERM):
        before.callback(signal.signal, number, signal.signal(number, stop))
    return before


def conclude(who: str, records: Mapping[str, Record], *, stopped: bool, go_on: str) -> int:
    """Print why tasks failed, with their last words, and which command continues what has not finished.

    Returns the exit code: 0, 1 if a task failed, or 130 if a stop was asked for and left one undone.
    """
    for what, record in records.items():
        if record.state == FAILED:
            print(printable(f"[{who}] {what} failed ({record.why}). Its last words:"), file=sys.stderr)
            print(printable(record.last_words or record.why), file=sys.stderr)
    states = {record.state for record in records.values()}
    if states - {FINISHED}:
        print(f"continue: {program()} {go_on}", flush=True)
    if states & {FAILED, BLOCKED}:
        return 1
    return 130 if stopped and states - {FINISHED} else 0  # as a shell has it for Ctrl-C


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
