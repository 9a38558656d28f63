"""Waits for room on the disk. What may be deleted is deleted first, and what is waited for is logged.

Both waits have no end but `should_stop`: what was trained would be lost otherwise. When the run is to stop, what was
waited for is tried anyway.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from async_grpo.errors import DiskFullError
from async_grpo.log import logger
from async_grpo.telemetry.waiting import Reminder

RETRY_S = 1.0


def wait_for_room(
    folder: Path, needed_bytes: int, *, make_room: Callable[[], None], should_stop: Callable[[], bool]
) -> None:
    """Wait until a checkpoint of `needed_bytes` fits."""
    if shutil.disk_usage(folder).free >= needed_bytes or should_stop():
        return
    needed = f"{needed_bytes / 1e6:.0f} MB of room in {folder} for a checkpoint"
    logger.warning("waiting for {}", needed)
    make_room()
    with Reminder(lambda: needed) as reminder:
        while shutil.disk_usage(folder).free < needed_bytes and not should_stop():
            reminder.tick()
            time.sleep(RETRY_S)


def write_with_room(
    write: Callable[[], object], *, should_stop: Callable[[], bool], make_room: Callable[[], None] = lambda: None
) -> None:
    """Call `write` until it finds room.

    Raises:
        DiskFullError: the run is to stop, and there is still no room.
    """
    try:
        write()
        return
    except DiskFullError as error:
        missing = str(error)
    logger.warning("{} Waiting for room.", missing)
    with Reminder(lambda: f"room on the disk: {missing}") as reminder:
        while True:
            make_room()  # again each time: a worker may have been faster
            try:
                write()
                return
            except DiskFullError:
                if should_stop():
                    raise
            reminder.tick()
            time.sleep(RETRY_S)
