"""η, the strength of guidance: a smaller one follows the head more."""

from __future__ import annotations

import math

from async_grpo.errors import UsageError


def one_eta(eta: float | None, inverse_eta: float | None) -> float:
    """Return η, of which the original's `eta` is the reciprocal. `UsageError`: it is no strength."""
    if (eta is None) == (inverse_eta is None):
        raise UsageError(
            "Give one of eta and inverse_eta: eta must be over 0, in units of the reward, and inverse_eta is its "
            "reciprocal; off is no guidance."
        )
    name, value = ("eta", eta) if eta is not None else ("inverse_eta", inverse_eta)
    if value is None or not 0 < value < math.inf:  # NaN neither
        raise UsageError(
            f"{name} must be over 0, in units of the reward (inverse_eta: of its reciprocal), got {value}; off is no "
            "guidance."
        )
    return float(value) if name == "eta" else 1 / value
