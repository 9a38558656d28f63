"""What a program may use, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

from async_grpo.errors import AsyncGRPOError

EXITED, TIMED_OUT, TOO_MUCH_OUTPUT = "exited", "timed out", "too much output"


class SandboxError(AsyncGRPOError):
    """Model-written code was not run: it was not allowed, or there is no way to isolate it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program."""

    wall_s: float = 5.0  # from its start to its end
    cpu_s: int = 5  # of each of its processes
    memory_bytes: int = 256 << 20  # address space of each of its processes
    file_bytes: int = 8 << 20  # of one file, and of all files together
    processes: int = 8  # threads count
    open_files: int = 64
    output_bytes: int = 64 << 10  # of standard output, and as much of standard error

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, got {value}: nothing runs without limits.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How a program ended. The program chose every value in it: do not trust them."""

    outcome: str  # exited, timed out, too much output
    exit_code: int  # its own; 128 + the signal that ended it; -1 if it was ended here
    stdout: str  # cut at `output_bytes`
    stderr: str
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.outcome == EXITED and self.exit_code == 0
