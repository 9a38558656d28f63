"""Memory, limits and clocks of this machine, or of the container that we are in."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from async_grpo.checks.doctor.finding import Finding, ok, warning
from async_grpo.formatting import size

LITTLE_MEMORY = 2_000_000_000  # a server and a worker take about 1 GB before there is a model
SMALL_SHM = 1_000_000_000
FEW_FILES = 1024
FEW_PROCESSES = 1024  # threads count, and torch starts one for each core in each process
UNLIMITED = resource.RLIM_INFINITY
_NO_LIMIT_V1 = 1 << 60  # version 1 of cgroups writes a huge number for "none"
_A_YEAR_THAT_HAS_BEEN = 2025


def memory() -> Iterator[Finding]:
    """RAM, and what the container's memory group leaves of it."""
    ram = psutil.virtual_memory()
    group = memory_group()
    free, what = int(ram.available), f"{size(ram.available)} of {size(ram.total)} RAM available"
    if group is not None and group.limit < ram.total:
        free = min(free, group.limit - group.used)
        what += f"; this container may use {size(group.limit)}, and uses {size(group.used)}"
    if free < LITTLE_MEMORY:
        yield warning(
            "memory",
            what,
            "Shared weights on a CPU count as memory of the container, too. End other processes, raise the container's "
            "limit (docker run --memory), or start fewer workers.",
        )
    else:
        yield ok("memory", what)


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    limit: int  # bytes
    used: int


def memory_group(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> MemoryGroup | None:
    """The tightest memory limit above this process, of version 1 or 2 of cgroups; None without one."""
    limits: list[MemoryGroup] = []
    for folder, limit_file, used_file in _memory_groups(root, own):
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and limit < _NO_LIMIT_V1:
            limits.append(MemoryGroup(limit, used or 0))
    return min(limits, key=lambda group: group.limit - group.used, default=None)


def _memory_groups(root: Path, own: Path) -> Iterator[tuple[Path, str, str]]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = top / path.lstrip("/")
        for place in (folder, *folder.parents):  # in a container the path may be that of the host
            if place == top or top in place.parents:
                yield place, *files


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def shared_memory(shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Our weights are in a memfd, which /dev/shm does not limit; others use it."""
    try:
        total = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    except OSError:
        yield ok("shared memory", f"no {shm}; weights do not need it (they are in a memfd, which counts as memory)")
        return
    if total < SMALL_SHM:
        yield warning(
            "shared memory",
            f"{shm} has {size(total)}. Weights do not need it (they are in a memfd), but vLLM, NCCL and data loaders "
            "with workers do",
            "docker run --ipc=host, or --shm-size=8g.",
        )
    else:
        yield ok("shared memory", f"{shm} has {size(total)}; weights do not need it (they are in a memfd)")


Limit = Callable[[int], tuple[int, int]]


def limits(limit_of: Limit = resource.getrlimit, pids: int | None = None) -> Iterator[Finding]:
    """`ulimit`s, and the container's limit of processes."""
    files, hard = limit_of(resource.RLIMIT_NOFILE)
    if 0 <= files < FEW_FILES:
        most = "unlimited" if hard == UNLIMITED else str(hard)
        yield warning(
            "open files", f"{files} a process (up to {most})", f"ulimit -n {min(4096, hard) if hard > 0 else 4096}"
        )
    else:
        yield ok("open files", f"{_amount(files)} a process")
    processes = [number for number in (limit_of(resource.RLIMIT_NPROC)[0], pids or _pids_limit()) if number >= 0]
    if processes and min(processes) < FEW_PROCESSES:
        yield warning(
            "processes",
            f"{min(processes)} processes and threads allowed",
            "ulimit -u 8192, or docker run --pids-limit -1. Threads count, and torch starts one for each core.",
        )
    else:
        yield ok("processes", f"{_amount(min(processes, default=UNLIMITED))} processes and threads allowed")
    yield _locked(limit_of(resource.RLIMIT_MEMLOCK)[0])
    address_space = limit_of(resource.RLIMIT_AS)[0]
    if address_space != UNLIMITED:
        yield warning(
            "address space",
            f"limited to {size(address_space)}; CUDA and mapped weights reserve far more than they use",
            "ulimit -v unlimited",
        )


def _locked(locked: int) -> Finding:
    amount = "unlimited" if locked == UNLIMITED else size(locked)
    return ok(
        "locked memory", f"{amount}; not needed (nothing here calls mlock, and CUDA's pinned memory is not counted)"
    )


def _amount(limit: int) -> str:
    return "any number of" if limit == UNLIMITED else str(limit)


def _pids_limit(root: Path = Path("/sys/fs/cgroup")) -> int:
    for path in (root / "pids.max", root / "pids" / "pids.max"):
        number = _number(path)
        if number is not None:
            return number
    return UNLIMITED


def clock() -> Iterator[Finding]:
    """Every wait is timed on the monotonic clock. The wall clock is for people only."""
    before = time.monotonic_ns()
    time.sleep(0.001)
    passed = time.monotonic_ns() - before
    year = time.gmtime().tm_year
    if not 0 < passed < 60 * 1_000_000_000:
        yield warning(
            "clock",
            f"CLOCK_MONOTONIC advanced by {passed} ns in a sleep of 1 ms",
            "Waits and deadlines rely on it. Look at the clock source of this (virtual) machine: "
            "cat /sys/devices/system/clocksource/clocksource0/current_clocksource",
        )
    elif year < _A_YEAR_THAT_HAS_BEEN:
        yield warning(
            "clock",
            f"the wall clock says {year}; runs do not rely on it, but downloads (certificates) and logs do",
            "Set it, e.g. timedatectl set-ntp true.",
        )
    else:
        yield ok("clock", "the monotonic clock advances; the wall clock is only shown, never compared")
