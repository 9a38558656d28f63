"""Waits for space on the disk. What may be deleted is deleted first, and what is waited for is logged.

Both waits have no end but `should_stop`: what was trained would be lost otherwise. When the run is to stop, what was
waited for is tried anyway, and `said_if_full` says what was not written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from async_grpo.errors import AsyncGRPOError, DiskFullError
from async_grpo.formatting import size
from async_grpo.log import logger
from async_grpo.telemetry.waiting import Reminder

RETRY_S = 1.0


def wait_for_space(
    folder: Path, needed_bytes: int, *, make_space: Callable[[], None], should_stop: Callable[[], bool]
) -> None:
    """Wait until a checkpoint of `needed_bytes` fits."""
    if shutil.disk_usage(folder).free >= needed_bytes or should_stop():
        return
    needed = f"{needed_bytes / 1e6:.0f} MB of room in {folder} for a checkpoint"
    logger.warning("waiting for {}", needed)
    make_space()
    with Reminder(lambda: needed) as reminder:
        while shutil.disk_usage(folder).free < needed_bytes and not should_stop():
            reminder.tick()
            time.sleep(RETRY_S)


@contextmanager
def said_if_full(folder: Path, needed_bytes: int, what: str) -> Iterator[None]:
    """Write what a run is continued from, by any library. `DiskFullError` if it fails and its bytes find no space."""
    try:
        yield
    except Exception as error:
        free = shutil.disk_usage(folder).free
        if free >= needed_bytes or (isinstance(error, AsyncGRPOError) and not isinstance(error, DiskFullError)):
            raise
        raise DiskFullError(
            f"The disk is full: {what} was not written. It takes about {size(needed_bytes)}, and {size(free)} are free "
            f"in {folder.absolute()}. Make room, then continue with --resume: all groups since the last checkpoint are "
            "kept in done/ and trained on again. A run without a checkpoint starts again, with --overwrite."
        ) from error


def retry_while_full(
    write: Callable[[], object], *, should_stop: Callable[[], bool], make_space: Callable[[], None] = lambda: None
) -> None:
    """Call `write` until it finds space.

    Raises:
        DiskFullError: the run is to stop, and there is still no space.
    """
    try:
        write()
        return
    except DiskFullError as error:
        missing = str(error)
    logger.warning("{} Waiting for room.", missing)
    with Reminder(lambda: f"room on the disk: {missing}") as reminder:
        while True:
            make_space()  # again each time: a worker may have been faster
            try:
                write()
                return
            except DiskFullError:
                if should_stop():
                    raise
            reminder.tick()
            time.sleep(RETRY_S)
