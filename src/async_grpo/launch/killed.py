"""Why a child was killed: whether the kernel did it for lack of memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


class MemoryWatch:
    """Remembers how often the kernel had killed a process of our control group for lack of memory when it was made."""

    def __init__(self) -> None:
        self._before = _kills_of_our_group()

    def lacked(self) -> bool:
        """Whether the kernel has killed one since."""
        return _kills_of_our_group() > self._before

    def verdict(self) -> str:
        """A phrase about a process that SIGKILL ended: out of memory, or that nothing is known of it."""
        if self.lacked():
            return "most likely out of memory: the kernel has killed a process of its control group for that meanwhile"
        return "by another process: its control group has reported no lack of memory"


def _kills_of_our_group() -> int:
    """For lack of memory, its own or the machine's, in the group of this process and so of its children."""
    with suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                counters = _CGROUPS / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                counters = _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
            else:
                continue
            with suppress(OSError, ValueError, KeyError):  # not this kernel's, or not to be seen from a container
                return int(dict(map(str.split, counters.read_text().splitlines()))["oom_kill"])
    return 0
