"""What starts and ends the processes of a schedule: on this machine, or elsewhere (`slurm`).

Each child is named by its task. A starter that runs children elsewhere makes of `add` a submission, and of the rest
what its cluster has for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

from async_grpo.launch.supervisor import Child, Exit, Exits, Supervisor
from async_grpo_experiments.slots import held

LOST = 1000  # "exit code" of a child that has ended, and left none: its machine may have died


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedChild(Child):
    """A child of a place."""

    cores: tuple[int, ...] = ()  # those that it may use; empty: all
    attempt: str = ""  # a name that no other attempt has


class Starter(Protocol):
    """Starts children, says which have ended, and ends the others when its block is left."""

    exits: dict[str, Exit]  # of those that have ended, by name

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def add(self, child: PlacedChild) -> int:
        """Start a child; returns its pid, or 0 for one that is not of this machine. `OSError`: it cannot."""

    def forget(self, name: str) -> None:
        """Drop a child that has ended."""

    def stop(self) -> None:
        """Make `run_until` return."""

    def hurry(self) -> None:
        """Kill what still runs when the block is left, instead of waiting for the grace."""

    def run_until(self, first_exit: Callable[[Exits], bool]) -> Exits:
        """Watch the children until this holds or a stop is asked for; calls `look` about ten times a second."""


OpenStarter = Callable[..., Starter]  # of `say`, what it says, and `look`, what it calls at each look


class LocalStarter(Supervisor):
    """Starts children here. They use the cores of their place, and end when this process does."""

    def __init__(self, *, say: Callable[[str], None], look: Callable[[], None]) -> None:
        super().__init__([], say=say, look=look)

    def add(self, child: Child) -> int:
        cores = child.cores if isinstance(child, PlacedChild) else ()
        return super().add(replace(child, command=[*held_by_us(cores), *child.command]))


def held_by_us(cores: tuple[int, ...] = ()) -> list[str]:
    """The beginning of a command line that has a process end with this one, and use these cores only."""
    return [sys.executable, "-I", "-S", held.__file__, str(os.getpid()), ",".join(map(str, cores)) or "all"]
