"""Reward functions that never give a number: training goes to its end with them, and nothing is learnt from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock

import torch

from async_grpo.log import logger
from async_grpo.records import distinct

PATIENCE = 4  # groups: a function may be for some rows only, and give None for all others


class Numberless:
    """Warns once of each reward function that has given only NaN or None so far, from any thread."""

    def __init__(self) -> None:
        self._settled: set[int] = set()  # places of functions that gave a number, or were warned of
        self._completions: Counter[int] = Counter()  # of those that did not
        self._groups = 0
        self._lock = Lock()

    def saw(self, names: Sequence[str], rewards: torch.Tensor, groups: int) -> None:
        """One call of the reward functions gave `rewards`, [completions, F], for so many groups."""
        silent = torch.isnan(rewards).all(dim=0).tolist()
        with self._lock:
            self._groups += groups
            self._settled |= {place for place, is_silent in enumerate(silent) if not is_silent}
            for place in [place for place in range(len(names)) if place not in self._settled]:
                self._completions[place] += len(rewards)
                if len(names) == 1 or self._groups >= PATIENCE:
                    self._warn(place, distinct(names)[place], alone=len(names) == 1)

    def _warn(self, place: int, name: str, *, alone: bool) -> None:
        self._settled.add(place)
        logger.warning(
            "the reward function {} gave no number, only NaN or None, for any of {} completions so far: {}. Let it "
            "return a number for each completion",
            name,
            self._completions[place],
            "they have no reward at all, and nothing is learnt from them" if alone else "it has no part in the reward",
        )
