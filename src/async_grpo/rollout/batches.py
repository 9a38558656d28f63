"""What a worker does for several groups together: it waits until they are there, and tells whose an error is."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

ISSUING_S = 0.002  # longer than the server takes to issue the next job of a round
A = TypeVar("A")
B = TypeVar("B")


def at_once(work: Callable[[Sequence[A]], list[B]], items: Sequence[A], failed: Callable[[A, str], None]) -> list[B]:
    """Do `work` for all items together, or for each alone where that fails: an error costs one item."""
    if not items:
        return []
    try:
        return work(items)
    except Exception:  # noqa: BLE001  # a row or a template that TRL cannot take: it belongs to one of the items
        if len(items) == 1:
            failed(items[0], traceback.format_exc())
            return []
    return [result for item in items for result in at_once(work, [item], failed)]


def once_issued(pending: Callable[[], int], enough: int) -> int:
    """How many jobs are pending when there are `enough`, or no more of them are being issued.

    The server issues a round job by job, and a batch of its first few takes nearly as long as one of them all.
    """
    before, now = 0, pending()
    while before < now < enough:
        time.sleep(ISSUING_S)
        before, now = now, pending()
    return now
