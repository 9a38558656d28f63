"""Total rewards and advantages of archived groups, as TRL computes them from the rewards that a group carries.

TRL keeps neither, and this is the same formula over numpy, so that reading an archive needs no torch.
`tests/integration/test_trl_contract_loss.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_EPSILON = 1e-4  # TRL's
CRITIC = "critic"  # `advantages` in `hyperparameters.json`, where they do not compare groups


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRule:
    """How a trainer makes advantages of rewards. The names are those of `trl.GRPOConfig`."""

    reward_weights: tuple[float, ...] | None = None  # [F]; None: 1 each
    scale_rewards: str = "group"  # or "batch", "none"
    multi_objective_aggregation: str = "sum_then_normalize"  # or "normalize_then_sum"
    in_groups: bool = True  # False: a critic has made them, and nothing here knows them

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> AdvantageRule:
        """The rule that `hyperparameters.json` says; TRL's defaults for what it does not."""
        weights = record.get("reward_weights")
        return AdvantageRule(
            reward_weights=tuple(weights) if weights else None,
            scale_rewards=str(record.get("scale_rewards", "group")),
            multi_objective_aggregation=str(record.get("multi_objective_aggregation", "sum_then_normalize")),
            in_groups=record.get("advantages") != CRITIC,
        )

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a group's advantages depend on the other groups of its batch."""
        return self.scale_rewards == "batch" or self.multi_objective_aggregation == "normalize_then_sum"

    def totals(self, rewards: NDArray[np.float32]) -> Floats:
        """Weighted sums [G] of rewards [G, F]; NaN where no function gave a reward."""
        with np.errstate(invalid="ignore"):  # of infinite rewards
            sums: Floats = np.nansum(rewards * self._weights(rewards), axis=1, dtype=np.float64)
        sums[np.isnan(rewards).all(axis=1)] = np.nan
        return sums

    def advantages(self, batch: Sequence[NDArray[np.float32]]) -> list[Floats]:
        """Advantages [G] of each group of a batch, given its rewards [G, F]; 0 where there was no reward."""
        with np.errstate(invalid="ignore"):  # of infinite rewards, which TRL takes as they are
            found = self._found(batch)
        most = float(np.finfo(np.float32).max)  # TRL computes in float32
        return [np.nan_to_num(values, nan=0.0, posinf=most, neginf=-most) for values in found]

    def _found(self, batch: Sequence[NDArray[np.float32]]) -> list[Floats]:
        if self.multi_objective_aggregation == "normalize_then_sum":
            each = [self._normalised_sums(rewards) for rewards in batch]
            everything = np.concatenate(each)
            spread, mean = _std(everything), _mean(everything)
            return [(totals - mean) / (spread + _EPSILON) for totals in each]
        each = [self.totals(rewards) for rewards in batch]
        of_batch = _std(np.concatenate(each)) if self.scale_rewards == "batch" else 0.0
        return [(totals - _mean(totals)) / self._scale(totals, of_batch) for totals in each]

    def teaches_nothing(self, rewards: NDArray[np.float32]) -> bool:
        """Whether the advantages of a group with these rewards [G, F] are all 0, whatever else is in its batch.

        Under `normalize_then_sum` that takes equal rewards of every function that counts: sums may be equal while the
        functions disagree. A reward that is not finite takes the advantages of its function or group with it.
        """
        if self.multi_objective_aggregation == "normalize_then_sum":
            columns = [column for column, weight in zip(rewards.T, self._weights(rewards), strict=True) if weight]
        else:
            columns = [self.totals(rewards)]
        spreads = np.nan_to_num([_std(np.asarray(column, np.float64)) for column in columns])
        return bool(np.isclose(spreads, 0.0).all())

    def _scale(self, totals: Floats, of_batch: float) -> float:
        if self.scale_rewards == "none":
            return 1.0
        return (of_batch if self.scale_rewards == "batch" else _std(totals)) + _EPSILON

    def _normalised_sums(self, rewards: NDArray[np.float32]) -> Floats:
        columns = [(column - _mean(column)) / (_std(column) + _EPSILON) for column in rewards.T.astype(np.float64)]
        sums: Floats = np.nansum(np.stack(columns, axis=1) * self._weights(rewards), axis=1)
        sums[np.isnan(rewards).all(axis=1)] = np.nan
        return sums

    def _weights(self, rewards: NDArray[np.float32]) -> Floats:
        functions = rewards.shape[1]
        weights = self.reward_weights or (1.0,) * functions
        # TRL adds a reward of its own for some environments, with weight 1, after the weights that the user gave
        return np.array((*weights, *(1.0,) * (functions - len(weights)))[:functions], np.float64)


def _mean(values: Floats) -> float:
    known = values[values == values]
    return float(known.mean()) if len(known) else 0.0


def _std(values: Floats) -> float:
    """With Bessel's correction, over what is not NaN, as TRL's `nanstd`."""
    known = values[values == values]
    with np.errstate(invalid="ignore"):  # of infinite rewards
        return float(known.std(ddof=1)) if len(known) > 1 else 0.0
