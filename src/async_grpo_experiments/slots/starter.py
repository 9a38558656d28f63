"""What starts and ends the processes of a schedule. `launch.supervisor.Supervisor` has this shape, for this machine.

Each child is named by its task. A starter that runs children elsewhere makes of `add` a submission, and of the rest
what its cluster has for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

from async_grpo.launch.supervisor import Child, Exit, Exits


class Starter(Protocol):
    """Starts children, says which have ended, and ends the others when its block is left."""

    exits: dict[str, Exit]  # of those that have ended, by name

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def add(self, child: Child) -> int:
        """Start a child; returns a number by which it is found again, the pid on this machine. `OSError`: it cannot."""

    def forget(self, name: str) -> None:
        """Drop a child that has ended."""

    def stop(self) -> None:
        """Make `run_until` return."""

    def hurry(self) -> None:
        """Kill what still runs when the block is left, instead of waiting for the grace."""

    def run_until(self, first_exit: Callable[[Exits], bool]) -> Exits:
        """Watch the children until this holds or a stop is asked for; calls `look` about ten times a second."""


class OpenStarter(Protocol):
    """Makes a starter of what it says and what it calls at each look."""

    def __call__(self, *, say: Callable[[str], None], look: Callable[[], None]) -> Starter: ...
