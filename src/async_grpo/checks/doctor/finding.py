"""One line of the doctor, and how it is printed."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from async_grpo.formatting import counted, printable
from async_grpo.training.machines import TrainerMachine


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # a run starts, but may be slow or fail later
    ERROR = "error"  # a run will not start, or not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    level: Level
    subject: str  # a word or two, e.g. "memory"
    found: str
    fix: str = ""  # what to do; empty when all is well

    def __post_init__(self) -> None:
        assert self.fix or self.level is Level.OK, f"{self.subject}: a warning or an error needs a fix"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the doctor is asked about."""

    run_dir: Path
    config: Path | None = None  # the setup file
    values: Mapping[str, str] | None = None  # of `--set`
    gpu_memory: int | None = None  # bytes of each GPU that the run is planned for
    ray: str | None = None  # address of a cluster
    machine: TrainerMachine | None = None  # which this is of a trainer on several
    node_wait: float = 60.0  # seconds to wait for the others


Check = Callable[[Asked], Iterator[Finding]]


ok, warning, error = (partial(Finding, level) for level in Level)
_COLOURS = {Level.OK: "32", Level.WARNING: "33", Level.ERROR: "1;31"}
_LEAST_WIDTH, _MOST_WIDTH = 60, 140


def line(finding: Finding, *, colour: bool = False, width: int | None = None) -> str:
    """`ok       memory         …`, with the fix beneath what is not."""
    of_terminal = _COLOURS[finding.level] if colour else ""
    heading, subject = f"{finding.level:<9}", f"{finding.subject:<15}"
    return paragraph(heading, subject, finding.found, finding.fix, colour=of_terminal, width=width)


def paragraph(heading: str, subject: str, found: str, more: str, *, colour: str = "", width: int | None = None) -> str:
    """Fold the text beside its heading and subject, and beneath it, after an arrow, what more there is to say.

    Args:
        colour: of the heading on a terminal, as "1;31"; empty: none.
    """
    width = width or max(_LEAST_WIDTH, min(_MOST_WIDTH, shutil.get_terminal_size((_MOST_WIDTH, 0)).columns))
    margin = " " * (len(heading) + len(subject))
    heading = f"\033[{colour}m{heading}\033[0m" if colour else heading
    rows = _wrapped(found, width - len(margin)) + (_wrapped(f"-> {more}", width - len(margin)) if more else [])
    return "\n".join([f"{heading}{subject}{rows[0]}", *(margin + row for row in rows[1:])])


def verdict(found: Sequence[Finding]) -> str:
    """The last line."""
    errors = sum(finding.level is Level.ERROR for finding in found)
    warnings = sum(finding.level is Level.WARNING for finding in found)
    if errors:
        return f"{counted(errors, 'error')}, {counted(warnings, 'warning')}: fix the errors first."
    return f"no errors, {counted(warnings, 'warning')}: a run can start."


def _wrapped(text: str, width: int) -> list[str]:
    """Fold long lines; those of a traceback stay lines."""
    rows = printable(text).splitlines()
    return [part for row in rows for part in textwrap.wrap(row, width, break_on_hyphens=False) or [""]]
