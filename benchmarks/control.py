"""A control of equal work: how steady the machine was while something else was measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

STEADY = 0.1  # how much of its fastest time a control may be slower
PAIRS = 5  # of a comparison, at least
_SIZE, _TIMES = 1024, 60  # a second or two on two cores
_MATRIX = np.ones((_SIZE, _SIZE), np.float32)


def control_s() -> float:
    """Seconds that the same products of matrices take now, on all cores."""
    started = time.monotonic()
    for _ in range(_TIMES):
        _MATRIX @ _MATRIX
    return time.monotonic() - started


def why_unmeasurable(values: Sequence[float], controls: Sequence[float], limit: float | None, target: str) -> str:
    """Why figures that were taken between these controls say nothing, or "".

    Args:
        limit: the best possible value; of a figure with a target it is known in which direction.
    """
    if controls and (moved := max(controls) / min(controls) - 1) > STEADY:
        return f"its control of equal work moved by {moved:.0%}"
    middle = statistics.median(values)
    if limit is not None and target and (middle > limit if target.startswith(">") else middle < limit):
        return f"{middle:.3g} is better than its limit, {limit:.3g}"
    return ""
