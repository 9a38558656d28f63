"""The few sizes of batches that are decoded in fixed shapes."""

from __future__ import annotations

LEAST_ROWS = 4
LEAST_TOKENS = 64  # of a row


def rounded(count: int, least: int) -> int:
    """Round up to a quarter of the power of two below it, and to a multiple of `least`."""
    step = max(least, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step
