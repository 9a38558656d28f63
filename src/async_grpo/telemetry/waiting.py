"""Waits that have a deadline, a subject and a liveness check, and that are never silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from async_grpo.errors import WaitTimeoutError
from async_grpo.log import logger
from async_grpo.telemetry.activity import activity

SAY_EVERY_S = 10.0
NAME_EVERY_S = 0.5  # what is waited for may take a look at the queue to name, too slow for short waits
WAIT = "WAIT"  # level of the messages about waits: as severe as INFO
logger.level(WAIT, no=logger.level("INFO").no)
T = TypeVar("T")


class Reminder:
    """Writes what this process waits for into its activity, and into the log every 10 seconds.

    As a context manager it ends the wait: the process is then doing what it did before the first `tick`.

    Args:
        what: what is waited for, as in "waiting for WHAT".
        on: names of the processes that could provide it.
    """

    def __init__(self, what: Callable[[], str], on: Callable[[], Sequence[str]] = tuple) -> None:
        self._what = what
        self._on = on
        self._started = self._said = self._named = time.monotonic()
        self._before: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            activity.doing(self._before)

    def tick(self) -> None:
        """Still waiting; called at every look."""
        now = time.monotonic()
        if self._before is None:
            self._before = activity.state
            activity.waits("")
        if now - self._named >= NAME_EVERY_S:
            self._named = now
            activity.waits(self._what(), self._on())
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            logger.log(WAIT, "waiting for {} ({:.0f} s so far)", self._what(), now - self._started)


def wait_until(
    ready: Callable[[], T | None],
    *,
    what: str,
    timeout_s: float,
    on: Sequence[str] = (),
    check_peer: Callable[[], None] | None = None,
    poll_s: float = 0.2,
) -> T:
    """Call `ready` until it returns something other than None, and return that.

    Args:
        what: what is waited for, as in "waiting for WHAT".
        on: names of the processes that could provide it.
        check_peer: raises when the process that is waited for can no longer provide it.

    Raises:
        WaitTimeoutError: `timeout_s` seconds went by.
    """
    deadline = time.monotonic() + timeout_s
    with Reminder(lambda: what, lambda: on) as reminder:
        while (result := ready()) is None:
            if check_peer is not None:
                check_peer()
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"Timed out after {timeout_s:.0f} s waiting for {what}.")
            reminder.tick()
            time.sleep(poll_s)
    return result
