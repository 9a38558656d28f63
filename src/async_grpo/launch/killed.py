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
        self._machine, self._group = _counted(_COUNTERS), _kills_of_our_group()
        self._log = _end_of_the_kernel_log()  # what is older may name an earlier process of the same number
        self._named: set[int] = set()

    def verdict(self, pid: int) -> str:
        """A phrase about a process that SIGKILL ended: out of memory, or that nothing is known of it."""
        self._read_the_kernel_log()
        if pid in self._named:
            return "out of memory: the kernel's log names it"
        if _kills_of_our_group() > self._group:
            return "most likely out of memory: its control group has reached its limit meanwhile"
        if _counted(_COUNTERS) > self._machine:
            return "most likely out of memory: the kernel has killed a process of this machine for that meanwhile"
        return "by another process: the kernel has reported no lack of memory"

    def _read_the_kernel_log(self) -> None:
        if self._log is None:
            return
        with suppress(OSError):  # BlockingIOError: that was all
            for _ in range(_MOST_RECORDS):
                with suppress(BrokenPipeError):  # a record was overwritten before it could be read; the next is there
                    record = os.read(self._log, 8192).decode(errors="replace")
                    self._named |= {int(pid) for pid in _KILLED.findall(record)}


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
    """Kills, of the whole machine or of a control group."""
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _end_of_the_kernel_log() -> int | None:
    """A descriptor that reads what comes from now on; None where the log may not be read."""
    with suppress(OSError):
        log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        with suppress(OSError):
            os.lseek(log, 0, os.SEEK_END)
            return log
        os.close(log)
    return None
