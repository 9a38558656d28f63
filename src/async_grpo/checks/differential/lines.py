"""One line of a check, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from async_grpo.checks.doctor.finding import paragraph
from async_grpo.formatting import counted


class Status(StrEnum):
    """The worse, the later."""

    EQUAL = "equal"
    DOCUMENTED = "documented"  # a difference that docs/trl.md names
    UNKNOWN = "unknown"  # it cannot be compared, and the cause says why
    DIFFERS = "differs"


_COLOURS = {Status.EQUAL: "32", Status.DOCUMENTED: "36", Status.UNKNOWN: "33", Status.DIFFERS: "1;31"}


@dataclass(frozen=True, slots=True)
class Line:
    """One subject that was compared."""

    status: Status
    subject: str  # a word or two, e.g. "losses"
    found: str
    cause: str = ""


equal, documented, unknown, differs = (partial(Line, status) for status in Status)


def printed(line: Line, *, colour: bool = False) -> str:
    """As the doctor prints its lines."""
    heading, subject = f"{line.status:<12}", f"{line.subject:<29} "
    return paragraph(heading, subject, line.found, line.cause, colour=_COLOURS[line.status] if colour else "")


def verdict(lines: Sequence[Line]) -> str:
    count = {status: sum(line.status is status for line in lines) for status in Status}
    others = f"{counted(count[Status.DOCUMENTED], 'documented difference')}, {count[Status.UNKNOWN]} not comparable"
    if count[Status.DIFFERS]:
        return f"{counted(count[Status.DIFFERS], 'difference')} from plain TRL, {others}."
    return f"no difference from plain TRL at staleness 0, {others}."
