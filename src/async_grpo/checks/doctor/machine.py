"""Memory and limits of this machine, or of the container that this process runs in."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from async_grpo.checks.doctor.finding import Finding, ok, warning
from async_grpo.formatting import size

LITTLE_MEMORY = 2_000_000_000  # a server and a worker take about 1 GB before there is a model
SMALL_SHM = 1_000_000_000
FEW_FILES = 1024
FEW_PROCESSES = 1024  # threads count, and torch starts one for each core in each process
UNLIMITED = resource.RLIM_INFINITY
_CGROUPS = Path("/sys/fs/cgroup")


def memory() -> Iterator[Finding]:
    """RAM, and what the container's memory limit leaves of it."""
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
            "End other processes, raise the container's limit (docker run --memory), or start fewer workers. Shared "
            "weights on a CPU count as memory of the container.",
        )
    else:
        yield ok("memory", what)


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    limit: int  # bytes
    used: int


def memory_group(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> MemoryGroup | None:
    """The tightest memory limit of the control groups (version 2) above this process; None without one."""
    limits = []
    for folder in _own_groups(root, own):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None:
            limits.append(MemoryGroup(limit, used or 0))
    return min(limits, key=lambda group: group.limit - group.used, default=None)


def _own_groups(root: Path, own: Path) -> list[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = root / path  # in a container the path may be that of the host; the folders above still count
    return [folder, *(place for place in folder.parents if place.is_relative_to(root))]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def shared_memory(shm: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Weights are in a memfd, which /dev/shm does not limit; vLLM, NCCL and data loaders use it."""
    total = psutil.disk_usage(str(shm)).total if shm.exists() else 0
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


def limits(limit_of: Limit = resource.getrlimit) -> Iterator[Finding]:
    """`ulimit`s, and the container's limit of processes."""
    files, hard = limit_of(resource.RLIMIT_NOFILE)
    if 0 <= files < FEW_FILES:
        yield warning("open files", f"{files} a process", f"ulimit -n {min(4096, hard) if hard > 0 else 4096}")
    else:
        yield ok("open files", f"{_amount(files)} a process")
    known = (limit_of(resource.RLIMIT_NPROC)[0], _number(_CGROUPS / "pids.max"))
    processes = min((limit for limit in known if limit is not None and limit >= 0), default=UNLIMITED)
    if 0 <= processes < FEW_PROCESSES:
        yield warning(
            "processes",
            f"{processes} processes and threads allowed",
            "ulimit -u 8192, or docker run --pids-limit -1. Threads count, and torch starts one for each core.",
        )
    else:
        yield ok("processes", f"{_amount(processes)} processes and threads allowed")
    address_space = limit_of(resource.RLIMIT_AS)[0]
    if address_space != UNLIMITED:
        yield warning(
            "address space",
            f"limited to {size(address_space)}; CUDA and mapped weights reserve far more than they use",
            "ulimit -v unlimited",
        )


def _amount(limit: int) -> str:
    return "any number of" if limit == UNLIMITED else str(limit)
