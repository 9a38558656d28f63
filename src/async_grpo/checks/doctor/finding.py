"""One line of the doctor, and how it is printed."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from async_grpo.formatting import counted, printable


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


Check = Callable[[], Iterator[Finding]]


def ok(subject: str, found: str) -> Finding:
    return Finding(Level.OK, subject, found)


def warning(subject: str, found: str, fix: str) -> Finding:
    return Finding(Level.WARNING, subject, found, fix)


def error(subject: str, found: str, fix: str) -> Finding:
    return Finding(Level.ERROR, subject, found, fix)


_COLOURS = {Level.OK: "32", Level.WARNING: "33", Level.ERROR: "1;31"}
_SUBJECT = 15
_LEVEL = 9
_LEAST_WIDTH, _MOST_WIDTH = 60, 140


def line(finding: Finding, *, colour: bool = False, width: int | None = None) -> str:
    """`ok       memory         …`, with the fix beneath what is not."""
    level = Heading(finding.level, _LEVEL, _COLOURS[finding.level] if colour else "")
    return paragraph(level, f"{finding.subject:<{_SUBJECT}}", finding.found, finding.fix, width)


class Heading(NamedTuple):
    """The word that a line begins with."""

    word: str
    width: int
    colour: str = ""  # of the terminal; empty: none

    def __str__(self) -> str:
        text = f"{self.word:<{self.width}}"
        return f"\033[{self.colour}m{text}\033[0m" if self.colour else text


def paragraph(heading: Heading, subject: str, found: str, more: str, width: int | None = None) -> str:
    """The text beside its heading and subject, and beneath it, after an arrow, what more there is to say."""
    width = width or max(_LEAST_WIDTH, min(_MOST_WIDTH, shutil.get_terminal_size((_MOST_WIDTH, 0)).columns))
    margin = " " * (heading.width + len(subject))
    first, *rest = _wrapped(found, width - len(margin))
    lines = [f"{heading}{subject}{first}", *(margin + text for text in rest)]
    if more:
        lines += [margin + text for text in _wrapped(f"-> {more}", width - len(margin))]
    return "\n".join(lines)


def verdict(found: Sequence[Finding]) -> str:
    """The last line."""
    errors = sum(finding.level is Level.ERROR for finding in found)
    warnings = sum(finding.level is Level.WARNING for finding in found)
    if errors:
        return f"{counted(errors, 'error')}, {counted(warnings, 'warning')}: fix the errors first."
    return f"no errors, {counted(warnings, 'warning')}: a run can start."


def _wrapped(text: str, width: int) -> list[str]:
    """Long lines are folded; those of a traceback stay lines."""
    return [
        part
        for row in printable(text).splitlines()
        for part in textwrap.wrap(row, width, break_on_hyphens=False) or [""]
    ]
