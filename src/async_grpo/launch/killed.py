"""Why a child was killed: whether the kernel did it for lack of memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_KERNEL_LOG = Path("/dev/kmsg")
_COUNTERS = Path("/proc/vmstat")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory)[^\n]*?Killed process (\d+)\b")
_MOST_RECORDS = 100_000


class MemoryWatch:
    """Remembers how often the kernel had killed a process for lack of memory when it was made."""

    def __init__(self) -> None:
        self._machine, self._group = _kills_of_the_machine(), _kills_of_our_group()

    def verdict(self, pid: int) -> str:
        """A phrase about a process that SIGKILL ended: out of memory, or that nothing is known of it."""
        if pid in _in_the_kernel_log():
            return "out of memory: the kernel's log names it"
        if _kills_of_our_group() > self._group:
            return "most likely out of memory: its control group has reached its limit meanwhile"
        if _kills_of_the_machine() > self._machine:
            return "most likely out of memory: the kernel has killed a process of this machine for that meanwhile"
        return "by another process: the kernel has reported no lack of memory"


def _kills_of_the_machine() -> int:
    return _counted(_COUNTERS)


def _kills_of_our_group() -> int:
    """Of the control group that this process, and so its children, are in; both versions of the interface."""
    found = 0
    with suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += _counted(_CGROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                found += _counted(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


def _counted(file: Path) -> int:
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _in_the_kernel_log() -> set[int]:
    """The processes that it names; empty where it may not be read."""
    found: set[int] = set()
    try:
        log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return found
    try:
        for _ in range(_MOST_RECORDS):
            with suppress(BrokenPipeError):  # a record was overwritten before it could be read; the next is there
                found |= {int(pid) for pid in _KILLED.findall(os.read(log, 8192).decode(errors="replace"))}
    except OSError:  # BlockingIOError: that was all
        pass
    finally:
        os.close(log)
    return found
