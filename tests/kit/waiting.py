"""Waits of tests: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

DEADLINE_S = 120.0


def until(condition: Callable[[], Any], what: str = "what was waited for") -> Any:
    """The first true result of `condition`."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {DEADLINE_S:.0f} s"
        time.sleep(0.005)
    return found


def is_gone(process: psutil.Process | int) -> bool:
    """Whether a process, or the one with this pid, has ended; a zombie has."""
    try:
        return (psutil.Process(process) if isinstance(process, int) else process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
