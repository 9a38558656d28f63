"""One line of a check, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from async_grpo.checks.doctor.finding import Heading, paragraph
from async_grpo.formatting import counted


class Status(StrEnum):
    """The worse, the later."""

    EQUAL = "equal"
    DOCUMENTED = "documented"  # a difference that docs/trl.md names
    UNKNOWN = "unknown"  # it cannot be compared, and the cause says why
    DIFFERS = "differs"


_COLOURS = {Status.EQUAL: "32", Status.DOCUMENTED: "36", Status.UNKNOWN: "33", Status.DIFFERS: "1;31"}
_STATUS, _SUBJECT = 12, 30  # columns


@dataclass(frozen=True, slots=True)
class Line:
    """One subject that was compared."""

    status: Status
    subject: str  # a word or two, e.g. "losses"
    found: str
    cause: str = ""


def equal(subject: str, found: str) -> Line:
    return Line(Status.EQUAL, subject, found)


def printed(line: Line, *, colour: bool = False) -> str:
    """As the doctor prints its lines."""
    heading = Heading(line.status, _STATUS, _COLOURS[line.status] if colour else "")
    subject = line.subject if len(line.subject) < _SUBJECT else f"{line.subject} "
    return paragraph(heading, f"{subject:<{_SUBJECT}}", line.found, line.cause)


def verdict(lines: Sequence[Line]) -> str:
    """The last line."""
    count = {status: sum(line.status is status for line in lines) for status in Status}
    others = f"{counted(count[Status.DOCUMENTED], 'documented difference')}, {count[Status.UNKNOWN]} not comparable"
    if count[Status.DIFFERS]:
        return f"{counted(count[Status.DIFFERS], 'difference')} from plain TRL, {others}."
    return f"no difference from plain TRL at staleness 0, {others}."
