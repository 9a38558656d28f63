"""What the launcher shows: step lines, what matters of the children's logs, and on a terminal a panel under them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from async_grpo.errors import RunDirError
from async_grpo.formatting import for_people
from async_grpo.launch.child_log import LogLine, LogTail
from async_grpo.rundir.paths import SERVER
from async_grpo.setup.library_warnings import SAID_BY
from async_grpo.telemetry.activity import LOADING, STARTING
from async_grpo.telemetry.run_log import STEP
from async_grpo.telemetry.waiting import WAIT

if TYPE_CHECKING:
    from rich.console import Console

    from async_grpo.status.snapshot import RunView

STEP_LINE_EVERY_S = 2.0  # faster steps are thinned; metrics.jsonl and the logs have every one
PANEL_EVERY_S = 0.5
LOADING_EVERY_S = 10.0
PANEL_MARGIN = 4  # columns: a panel as wide as the terminal would be shifted when Ctrl-C writes `^C` behind it


class LineFilter:
    """Chooses the messages to show; the log files have all of them.

    Warnings are always shown, those of libraries once, though each process has them; the server's messages unless
    `quiet`, the workers' only if `verbose`. Of step lines the newest is shown every few seconds, and before any other
    line.

    Args:
        with_panel: a panel shows what is waited for, so lines need not.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, with_panel: bool = False) -> None:
        self._quiet, self._verbose, self._with_panel = quiet, verbose, with_panel
        self._step: LogLine | None = None  # the newest, not shown yet
        self._said: set[str] = set()  # by libraries
        self._next_step_at = 0.0

    def choose(self, lines: Iterable[LogLine], now: float) -> Iterator[LogLine]:
        """What to show now of `lines` and of what was held back."""
        for line in lines:
            if not self._matters(line):
                continue
            if line.level == STEP:
                self._step = line
            else:
                yield from self.rest(now)
                yield line
        if now >= self._next_step_at:
            yield from self.rest(now)

    def rest(self, now: float) -> Iterator[LogLine]:
        """The step line that is held back, if there is one."""
        if self._step is not None:
            yield self._step
            self._step, self._next_step_at = None, now + STEP_LINE_EVERY_S

    def _matters(self, line: LogLine) -> bool:
        if line.level in ("WARNING", "ERROR", "CRITICAL"):
            return not line.text.startswith(SAID_BY) or self._is_new(line.text)
        if self._quiet:
            return False
        return self._verbose or (line.name == SERVER and not (self._with_panel and line.level == WAIT))

    def _is_new(self, text: str) -> bool:
        if text in self._said:
            return False
        self._said.add(text)
        return True


class Screen:
    """Plain lines, for logs and pipes. While the run loads, it says so now and then."""

    has_panel = False

    def __init__(self, root: Path, logs: Sequence[LogTail] = (), *, quiet: bool = False, verbose: bool = False) -> None:
        self._root, self._logs, self._quiet = root, logs, quiet
        self._filter = LineFilter(quiet=quiet, verbose=verbose, with_panel=self.has_panel)
        self._ending = ""  # how the run ends, once it was asked to
        self._began = time.monotonic()
        self._next_look = math.inf if quiet else self._began + LOADING_EVERY_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._show(self._filter.rest(time.monotonic()))

    def say(self, text: str) -> None:
        """The launcher's own news."""
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """News that are never left out."""
        self._print(f"[launcher] {text}")

    def stops(self, how: str) -> None:
        """Say how the run ends, from now on in the place of what holds it up."""
        self._ending = f"stopping: {how}"
        self.warn(self._ending)

    def refresh(self) -> None:
        """Show what is new; called often during the run."""
        now = time.monotonic()
        self._show(self._filter.choose((line for log in self._logs for line in log.new_lines()), now))
        if now >= self._next_look:
            self._look(now)

    def _look(self, now: float) -> None:
        self._next_look = now + LOADING_EVERY_S
        view = self._view()
        if isinstance(view, str):
            return
        if view.state not in (STARTING, LOADING):
            self._next_look = math.inf
            return
        doing = ", ".join(f"{process.name} {process.text}" for process in (view.server, *view.workers) if process)
        self.say(f"the run is loading, {for_people(now - self._began)} so far: {doing or 'processes start'}")

    def _show(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            if line.level == STEP:
                self._print(f"{line.time} {line.text}", is_step=True)
            else:
                self._print(str(line))

    def _print(self, text: str, *, is_step: bool = False) -> None:
        print(text, flush=True)

    def _view(self) -> RunView | str:
        """The run, or why it cannot be shown. A picture that cannot be drawn must not end a run."""
        from async_grpo.status.snapshot import look

        try:
            view = look(self._root, details=False)
            return replace(view, bottleneck=self._ending or view.bottleneck) if view.bottleneck else view
        except (RunDirError, OSError) as error:
            return str(error)
        except Exception as error:  # noqa: BLE001
            return f"the run cannot be shown ({type(error).__name__}: {error}); it continues"


class PanelScreen(Screen):
    """A terminal: lines scroll, and a panel with the run's state stays under them. Gone when the run has ended."""

    has_panel = True

    def __init__(self, root: Path, logs: Sequence[LogTail] = (), *, console: Console, verbose: bool = False) -> None:
        super().__init__(root, logs, verbose=verbose)
        from rich.live import Live

        self._next_look = 0.0
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            super().__exit__(*exc)
            self._live.update("", refresh=True)
        finally:
            self._live.stop()

    def _look(self, now: float) -> None:
        from rich.constrain import Constrain

        from async_grpo.status.render import panel

        self._next_look = now + PANEL_EVERY_S
        view = self._view()
        shown = view if isinstance(view, str) else Constrain(panel(view), self._console.width - PANEL_MARGIN)
        self._live.update(shown, refresh=True)

    def _print(self, text: str, *, is_step: bool = False) -> None:
        from rich.text import Text

        if is_step:
            self._console.print(Text(fitting(text, self._console.width)), no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(Text(text), soft_wrap=True)


def fitting(step_line: str, width: int) -> str:
    """The parts of a step line that fit into a terminal; the panel has the others."""
    parts = step_line.split("  ")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def open_screen(root: Path, logs: Sequence[LogTail], *, quiet: bool, verbose: bool) -> Screen:
    """A panel where standard output is a terminal that can move its cursor, else lines."""
    if not quiet and (console := live_console()) is not None:
        return PanelScreen(root, logs, console=console, verbose=verbose)
    return Screen(root, logs, quiet=quiet, verbose=verbose)


def live_console() -> Console | None:
    """Standard output, where it is a terminal that can move its cursor."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    return console if console.is_terminal and not console.is_dumb_terminal else None
