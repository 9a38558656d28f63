"""The disk of the run directory: room, whether a queue can be there, and whether its changes are noticed at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from async_grpo.checks.doctor.finding import Finding, error, ok, warning
from async_grpo.errors import RunDirError
from async_grpo.formatting import size
from async_grpo.queue.wakeups import IN_MOVED_TO, DirectoryWatch
from async_grpo.rundir.folders import check_place, nearest_existing

LITTLE_ROOM = 5_000_000_000
NO_ROOM = 100_000_000
FEW_FILES_LEFT = 20_000  # an archive keeps 10,000 groups


def room(run_dir: Path) -> Iterator[Finding]:
    """Bytes and files that the disk of the run directory has left."""
    disk = os.statvfs(nearest_existing(run_dir))
    free = disk.f_bavail * disk.f_frsize
    found = f"{size(free)} free where {run_dir} is"
    if free < NO_ROOM:
        yield error("disk", found, "Free some space, or choose another --run-dir: a full disk stops the run.")
    elif free < LITTLE_ROOM:
        yield warning("disk", found, "Free some space, or keep less: --keep-done 1GB, save_total_limit=2.")
    else:
        yield ok("disk", found)
    if disk.f_files > 0 and disk.f_favail < FEW_FILES_LEFT:
        yield warning(
            "files on disk",
            f"room for {disk.f_favail} more files; each used group is one",
            f"Delete files there, or --keep-done {max(1, disk.f_favail // 4)}.",
        )


def place(run_dir: Path) -> Iterator[Finding]:
    """Whether the queue can be there: on a local disk, writable by this user and by no other."""
    existing = nearest_existing(run_dir)
    fix = "Choose a --run-dir on a local disk (ext4, xfs, tmpfs) that only you can write to."
    try:
        check_place(run_dir)
    except RunDirError as refusal:
        yield error("run directory", str(refusal).split(". ")[0], fix)
        return
    yield ok("run directory", f"{run_dir}: on a local disk, yours to write to")
    yield from _inotify(existing)


def _inotify(folder: Path) -> Iterator[Finding]:
    watch = DirectoryWatch({folder: IN_MOVED_TO})
    if watch.blind:
        yield warning(
            "inotify",
            "not available: finished groups are noticed by looking 50 times a second, which costs some CPU time",
            "sysctl fs.inotify.max_user_instances=1024 fs.inotify.max_user_watches=65536 (as root, on the host).",
        )
    watch.close()
