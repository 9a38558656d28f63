"""What the launcher shows: step lines, what matters of the children's logs, and on a terminal a panel under them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from async_grpo.errors import RunDirError
from async_grpo.formatting import for_people
from async_grpo.telemetry.activity import LOADING, STARTING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from async_grpo.status.snapshot import RunView

STEP_LINE_EVERY_S = 2.0  # faster steps are thinned; metrics.jsonl and the logs have every one
PANEL_EVERY_S = 0.5
LOADING_EVERY_S = 15.0

_LINE = re.compile(r"\[(?P<name>[^]]+)\] (?P<time>\S+) (?P<level>[A-Z]+) +(?P<text>.*)", re.DOTALL)
_STEP = re.compile(r"step \d+/\d+ ")
_QUIET = ("WARNING", "ERROR", "CRITICAL")


class LineFilter:
    """Chooses from the children's log lines what the screen shows; their files have all of it.

    Warnings are always shown, the server's messages unless `quiet`, the workers' only if `verbose`. Of step lines that
    follow each other fast, one every few seconds is shown, and the last.

    Args:
        with_panel: a panel shows what is waited for, so lines need not.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, with_panel: bool = False) -> None:
        self._quiet, self._verbose, self._with_panel = quiet, verbose, with_panel
        self._held = ""  # the last step line, not shown yet
        self._shown_at = -STEP_LINE_EVERY_S

    def choose(self, lines: Sequence[str], now: float) -> Iterator[str]:
        """What to show now of `lines` and of what was held back."""
        for line in lines:
            match = _LINE.fullmatch(line)
            if match is None or not self._matters(match["name"], match["level"], match["text"]):
                continue
            if _STEP.match(match["text"]):
                self._held = f"{match['time']} {match['text']}"
                if now - self._shown_at >= STEP_LINE_EVERY_S:
                    yield from self.rest(now)
            else:
                yield from self.rest(now)
                yield line
        if now - self._shown_at >= STEP_LINE_EVERY_S:
            yield from self.rest(now)

    def rest(self, now: float) -> Iterator[str]:
        """The step line that is held back, if there is one."""
        if self._held:
            self._shown_at = now
            yield self._held
            self._held = ""

    def _matters(self, name: str, level: str, text: str) -> bool:
        if level in _QUIET:
            return True
        if self._quiet:
            return False
        if self._verbose:
            return True
        return name == "server" and not (self._with_panel and text.startswith("waiting for "))


class Screen:
    """Plain lines, for logs and pipes. While the run loads, it says so now and then."""

    def __init__(self, root: Path, *, quiet: bool = False, verbose: bool = False) -> None:
        self._root = root
        self._quiet = quiet
        self._filter = LineFilter(quiet=quiet, verbose=verbose, with_panel=self.has_panel)
        self._began = self._next_look = time.monotonic()
        self._loading = True

    has_panel = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for line in self._filter.rest(time.monotonic()):
            self._print(line, is_step=True)

    def say(self, text: str) -> None:
        """The launcher's own news."""
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """News that are never left out."""
        self._print(f"[launcher] {text}")

    def show(self, lines: Sequence[str]) -> None:
        """Log lines of children, as `LogTail` gives them."""
        for line in self._filter.choose(lines, time.monotonic()):
            self._print(line, is_step=not line.startswith("["))

    def refresh(self) -> None:
        """Called often while the run goes on."""
        now = time.monotonic()
        if self._quiet or not self._loading or now < self._next_look:
            return
        self._next_look = now + LOADING_EVERY_S
        view = self._view()
        if isinstance(view, str) or view.state not in (STARTING, LOADING):
            self._loading = isinstance(view, str)
        elif now - self._began >= LOADING_EVERY_S:
            processes = [view.server, *view.workers]
            doing = ", ".join(f"{process.name} {process.text}" for process in processes if process is not None)
            self.say(f"the run is loading, {for_people(now - self._began)} so far: {doing or 'processes start'}")

    def _print(self, line: str, *, is_step: bool = False) -> None:
        print(line, flush=True)

    def _view(self) -> RunView | str:
        """The run, or why it cannot be shown. A picture that cannot be drawn must not end a run."""
        from async_grpo.status.diagnosis import DEAD
        from async_grpo.status.snapshot import look

        try:
            view = look(self._root, details=False)
        except (RunDirError, OSError) as error:
            return str(error)
        except Exception as error:  # noqa: BLE001
            return f"the run cannot be shown ({type(error).__name__}: {error}); it goes on"
        return replace(view, state=STARTING, sentence="the processes start.") if view.state == DEAD else view


class PanelScreen(Screen):
    """A terminal: lines scroll, and a panel with the run's state stays under them. Gone when the run has ended."""

    has_panel = True

    def __init__(
        self, root: Path, *, quiet: bool = False, verbose: bool = False, console: Console | None = None
    ) -> None:
        super().__init__(root, quiet=quiet, verbose=verbose)
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(highlight=False, markup=False)
        self._restore_keys: Callable[[], None] = lambda: None
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._restore_keys = _echo_no_control_keys()
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            super().__exit__(*exc)
            self._live.update("", refresh=True)
        finally:
            self._live.stop()
            self._restore_keys()

    def refresh(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + PANEL_EVERY_S
            self._live.update(self._panel(), refresh=True)

    def _print(self, line: str, *, is_step: bool = False) -> None:
        """A step line is cut where the terminal ends: the panel has the rest."""
        from rich.text import Text

        if is_step:
            self._console.print(Text(line), no_wrap=True, overflow="ellipsis")
        else:
            self._console.print(Text(line), soft_wrap=True)

    def _panel(self) -> RenderableType:
        from async_grpo.status.render import panel

        view = self._view()
        return view if isinstance(view, str) else panel(view)


def _echo_no_control_keys() -> Callable[[], None]:
    """Keep the terminal from writing `^C` into the panel, which would shift it. Returns what takes that back."""
    import termios

    def change(settings: list[Any]) -> None:
        """But not from the background (`&`, Ctrl-Z and `bg`): the kernel would stop us, and the shell has its own."""
        with suppress(termios.error, OSError):
            if os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp():
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, settings)

    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (termios.error, OSError, ValueError):  # standard input is no terminal
        return lambda: None
    change([*before[:3], before[3] & ~termios.ECHOCTL, *before[4:]])
    return lambda: change(before)


def open_screen(root: Path, *, quiet: bool, verbose: bool) -> Screen:
    """A panel where standard output is a terminal that can move its cursor, else lines."""
    if quiet or not sys.stdout.isatty():
        return Screen(root, quiet=quiet, verbose=verbose)
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if console.is_dumb_terminal or not console.is_terminal:
        return Screen(root, verbose=verbose)
    return PanelScreen(root, verbose=verbose, console=console)
