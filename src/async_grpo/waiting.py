"""Waits that have a deadline, a subject and a liveness check, and that are never silent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from loguru import logger

from async_grpo.errors import WaitTimeoutError

SAY_EVERY_S = 10.0
T = TypeVar("T")


class Reminder:
    """Says every 10 seconds what is waited for, so that no wait is silent."""

    def __init__(self, what: Callable[[], str]) -> None:
        self._what = what
        self._started = self._said = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            logger.info("waiting for {} ({:.0f} s so far)", self._what(), now - self._started)


def wait_until(
    ready: Callable[[], T | None],
    *,
    what: str,
    timeout_s: float,
    check_peer: Callable[[], None] | None = None,
    poll_s: float = 0.2,
) -> T:
    """Call `ready` until it returns something other than None, and return that.

    Args:
        what: what is waited for, as in "waiting for WHAT".
        check_peer: raises when the one that is waited for can no longer deliver.

    Raises:
        WaitTimeoutError: `timeout_s` seconds went by.
    """
    deadline = time.monotonic() + timeout_s
    reminder = Reminder(lambda: what)
    while (result := ready()) is None:
        if check_peer is not None:
            check_peer()
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"Waited {timeout_s:.0f} s for {what}, in vain.")
        reminder.tick()
        time.sleep(poll_s)
    return result
