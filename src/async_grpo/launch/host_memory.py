"""The memory of this machine or container: whether workers fit, and whether one was killed for lack of it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import UsageError
from async_grpo.formatting import counted, size

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
WORKER_BYTES = 400_000_000  # of its own, with torch, transformers and TRL imported and no model yet: measured, on a CPU


def require_memory(workers: int) -> None:
    """`UsageError` where more workers are asked for than fit into the free memory."""
    free = free_memory()
    most = max(1, free // WORKER_BYTES)
    if workers > most:
        raise UsageError(
            f"{workers:,} workers need {size(workers * WORKER_BYTES)} of memory ({size(WORKER_BYTES)} each before they "
            f"load a model), and {size(free)} are free. There is room for {most:,} at most: --num-workers."
        )


def crowding(workers: int) -> str:
    """What to say where the workers are more than the cores; empty where they are not."""
    cores = len(os.sched_getaffinity(0))
    if workers <= cores:
        return ""
    return (
        f"{workers:,} workers and the server share {counted(cores, 'core')}, so each has less than one. Fewer may be "
        f"faster: --num-workers {cores}"
    )


def free_memory() -> int:
    """Bytes that this machine has left, or the container, if that has less."""
    import psutil

    free, group = int(psutil.virtual_memory().available), memory_group()
    return free if group is None else max(0, min(free, group.limit - group.used))


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory limit, and what is used of it."""

    limit: int  # bytes
    used: int  # without the files that the kernel would drop from its cache


def memory_group(root: Path = _CGROUPS, own: Path = _MEMBERSHIP) -> MemoryGroup | None:
    """The tightest memory limit of the control groups (version 2) above this process; None without one."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    folder = root / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    limits = []
    for path in (folder, *folder.parents):  # in a container the path may be the host's; the folders above still count
        limit = _number(path / "memory.max") if path.is_relative_to(root) else None
        if limit is not None:
            limits.append(MemoryGroup(limit, _used(path)))
    return min(limits, key=lambda group: group.limit - group.used, default=None)


def _used(group: Path) -> int:
    """What is used, as Kubernetes counts it: without files that were not read lately."""
    try:
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        stat = {}
    return max(0, (_number(group / "memory.current") or 0) - int(stat.get("inactive_file", 0)))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


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
