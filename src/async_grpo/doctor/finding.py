"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum


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
        assert self.fix or self.level is Level.OK, f"{self.subject}: a complaint without a fix helps nobody"


Check = Callable[[], Iterator[Finding]]


def ok(subject: str, found: str) -> Finding:
    return Finding(Level.OK, subject, found)


def warning(subject: str, found: str, fix: str) -> Finding:
    return Finding(Level.WARNING, subject, found, fix)


def error(subject: str, found: str, fix: str) -> Finding:
    return Finding(Level.ERROR, subject, found, fix)
