"""A live panel in a notebook: the figures of the terminal's panel, and the reward of each optimizer step."""

from __future__ import annotations

import importlib
import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.shape import is_number
from async_grpo.status.snapshot import RunView
from async_grpo.telemetry.entries import Entries, TakenBack

COLUMNS = 96
EVERY_S = 1.0
POINTS = 300  # of the plot; of a longer run, means of neighbours
_PLOT_WIDTH, _PLOT_HEIGHT = 640, 90
_PRE = '<pre style="margin:0;line-height:1.2;font-family:Menlo,Consolas,monospace">{code}</pre>'


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose outputs can be replaced."""
    return hasattr(_shell(), "kernel")


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


class Panel:
    """The panel of one run. It is in the cell that waits for the run; another cell gets one of its own."""

    def __init__(self, run_dir: Path) -> None:
        self._entries = Entries(RunDir(run_dir).metrics)
        self._rewards: dict[int, float] = {}  # by step
        self._display: Any = None
        self._cell = -1
        self._next = 0.0

    def refresh(self, view: RunView, news: Sequence[str] = (), *, at_once: bool = False) -> None:
        """Show the run as it is, and what the launcher has said lately; at most once a second, unless `at_once`."""
        if not at_once and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        ipython: Any = importlib.import_module("IPython.display")
        html = ipython.HTML(self.html(view, news))
        if self._cell != _shell().execution_count:
            self._cell, self._display = _shell().execution_count, ipython.display(html, display_id=True)
        else:
            self._display.update(html)

    def html(self, view: RunView, news: Sequence[str] = ()) -> str:
        self._read()
        said = "".join(f"<div>{escape(line)}</div>" for line in news)
        return as_html(view) + plot(self._rewards) + said

    def _read(self) -> None:
        for entry in self._entries.news():
            if isinstance(entry, TakenBack):
                self._rewards = {step: reward for step, reward in self._rewards.items() if step <= entry.after}
            elif is_number(reward := entry.get("reward")):
                self._rewards[entry["step"]] = reward


def as_html(view: RunView) -> str:
    """The terminal's panel with its colours; of a run that has ended, its outcome."""
    from rich.console import Console

    from async_grpo.status.render import panel, report

    view = replace(view, run_dir=Path(view.run_dir).name)
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_jupyter=False, force_terminal=True)
    console.print(panel(view) if view.live else report(replace(view, sentence="")))
    return console.export_html(inline_styles=True, code_format=_PRE)


def plot(rewards: Mapping[int, float]) -> str:
    """The rewards by step as a line; nothing of fewer than two."""
    if len(rewards) < 2:
        return ""
    steps = sorted(rewards)
    values, share = [rewards[step] for step in steps], max(1, math.ceil(len(steps) / POINTS))
    means = [sum(part) / len(part) for part in (values[at : at + share] for at in range(0, len(values), share))]
    low, high = min(means), max(means)
    across = _PLOT_WIDTH / max(1, len(means) - 1)
    up = _PLOT_HEIGHT / (high - low or 1.0)
    points = " ".join(f"{at * across:.0f},{_PLOT_HEIGHT - (mean - low) * up:.0f}" for at, mean in enumerate(means))
    return (
        f'<svg viewBox="-4 -16 {_PLOT_WIDTH + 8} {_PLOT_HEIGHT + 34}" width="{_PLOT_WIDTH}" role="img" '
        'fill="currentColor" font-size="12" font-family="sans-serif">'
        f'<text x="0" y="-5">reward, {low:.3g} to {high:.3g}</text>'
        f'<polyline points="{points}" fill="none" stroke="#4c78a8" stroke-width="1.5"/>'
        f'<text x="0" y="{_PLOT_HEIGHT + 14}">step {steps[0]}</text>'
        f'<text x="{_PLOT_WIDTH}" y="{_PLOT_HEIGHT + 14}" text-anchor="end">step {steps[-1]}</text></svg>'
    )
