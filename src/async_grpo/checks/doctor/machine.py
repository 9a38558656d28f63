"""What the machine has for a run: memory, disk, a place for its queue, and the isolation of programs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil

from async_grpo.checks.doctor.finding import Asked, Finding, error, ok, warning
from async_grpo.errors import RunDirError
from async_grpo.formatting import size
from async_grpo.launch.room import memory_group
from async_grpo.rewards.sandbox import SWITCH, SandboxError, run_code
from async_grpo.rundir.folders import check_place, nearest_existing

LITTLE_MEMORY = 2_000_000_000  # a server and a worker take about 1 GB before there is a model
LITTLE_ROOM = 5_000_000_000
NO_ROOM = 100_000_000


def memory(asked: Asked) -> Iterator[Finding]:
    """Judge the RAM, and what the container's memory limit leaves of it."""
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


def room(asked: Asked) -> Iterator[Finding]:
    """Judge the bytes that the disk of the run directory has left."""
    disk = os.statvfs(nearest_existing(asked.run_dir))
    free = disk.f_bavail * disk.f_frsize
    found = f"{size(free)} free where {asked.run_dir} is"
    if free < NO_ROOM:
        yield error("disk", found, "Free some space, or choose another --run-dir: a full disk stops the run.")
    elif free < LITTLE_ROOM:
        yield warning("disk", found, "Free some space, or keep less: --keep-done 1GB, save_total_limit=2.")
    else:
        yield ok("disk", found)


def place(asked: Asked) -> Iterator[Finding]:
    """Judge whether the queue can be there: on a local disk, writable by this user and by no other."""
    try:
        check_place(asked.run_dir)
    except RunDirError as refusal:
        fix = "Choose a --run-dir on a local disk (ext4, xfs, tmpfs) that only you can write to."
        yield error("run directory", str(refusal).split(". ")[0], fix)
    else:
        yield ok("run directory", f"{asked.run_dir}: on a local disk, yours to write to")


def sandbox(asked: Asked) -> Iterator[Finding]:
    """Judge the isolation of programs where the run is to execute some: the switch is set."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        run_code("pass")
    except SandboxError as refusal:
        yield error("sandbox", str(refusal), f"apt-get install bubblewrap, or unset {SWITCH}.")
    else:
        yield ok("sandbox", "programs that a model wrote are isolated by bubblewrap")
