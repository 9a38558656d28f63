"""The tools of a dialogue as TRL's loop sees them: calls are noted, made elsewhere, and then answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model has called, by TRL's reading of its message."""

    name: str
    tool: Callable[..., Any]
    arguments: Mapping[str, Any]
    coroutine: Any = None  # of an async tool that took its arguments
    error: Exception | None = None  # an async tool did not take its arguments


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tool returned, a text or a list of content blocks, or what it raised."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def noting(noted: list[Call], name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: noted.append(Call(name, tool, arguments))


def starting(noted: list[Call], name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
    def start(**arguments: Any) -> Any:
        try:
            noted.append(Call(name, tool, arguments, coroutine=tool(**arguments)))
        except Exception as error:
            noted.append(Call(name, tool, arguments, error=error))
            raise
        return _later(Outcome())

    return start


def giving(left: Iterator[Outcome]) -> Callable[..., Any]:
    return lambda **_: next(left).result()


def giving_later(left: Iterator[Outcome]) -> Callable[..., Any]:
    def give(**_: Any) -> Any:
        outcome = next(left)
        if isinstance(outcome.error, Refused):
            raise outcome.error.error
        return _later(outcome)

    return give


class Refused(Exception):
    """An async tool did not take its arguments: TRL answers that before it waits for any tool."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


async def _later(outcome: Outcome) -> Any:
    return outcome.result()
