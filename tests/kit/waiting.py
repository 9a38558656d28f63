"""Waits of tests: for a condition, never for a time."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

DEADLINE_S = 120.0


def until(
    condition: Callable[[], Any],
    what: str = "what was waited for",
    *,
    deadline_s: float = DEADLINE_S,
    process: subprocess.Popen[Any] | None = None,
    said: Callable[[], str] = str,
) -> Any:
    """The first true result of `condition`, while `process` runs; a failure shows what was `said`."""
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert process is None or process.poll() is None, f"ended while waiting for {what}:\n{said()}"
        assert time.monotonic() < deadline, f"{what} did not come in {deadline_s:.0f} s\n{said()}"
        time.sleep(0.005 if process is None else 0.05)
    return found


def is_gone(process: psutil.Process | int) -> bool:
    """Whether a process, or the one with this pid, has ended; a zombie has."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return not found.is_running() or found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_gone(processes: Iterable[psutil.Process | int]) -> None:
    """Wait for the end of all: what a process of ours has started itself may end a moment after it."""
    until(lambda: all(map(is_gone, processes)), "the end of each process")
