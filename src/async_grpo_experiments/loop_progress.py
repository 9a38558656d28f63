"""How far a long loop has come, said now and then: a stage whose log says nothing counts as hung."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from async_grpo.log import logger

SAY_EVERY_S = 60.0
_Item = TypeVar("_Item")


def told(items: Sequence[_Item], what: str) -> Iterator[_Item]:
    """Yield the items, and log once a minute how many are done: `120 of 400 batches are scored`."""
    said = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            logger.info(f"{done} of {len(items)} {what}")
        yield item
