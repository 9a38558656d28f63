"""Advantages of the turns of one group, from its outcome rewards and its turn rewards.

G completions; completion i has K_i turns, which are the runs of 1 in its tool mask. Its outcome reward is R^O, its turn
rewards are r_1 … r_K, R^T is their sum, and R^C = R^T + R^O. Each A = (R - mean) / (std + 1e-4) over the group, with
Bessel's correction, as in GRPO.

MT-GRPO: Zeng et al., arXiv 2505.11821, and the authors' code. `cae` is of that code of May 5, 2025 (commit 7860de6,
`advantage_est="cae"` of `mt_grpo_env_trainer.py`), which later commits do not have. `recursive` is of the later
versions of the paper: section 3, eq. 5 for two turns, appendix D for K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from async_grpo.errors import RunRefused

Floats = NDArray[np.float64]
Kind = Literal["outcome", "merged", "turn", "cae", "recursive", "reward_to_go"]
CREDITS: tuple[str, ...] = get_args(Kind)
EPSILON = 1e-4
Given = float | Sequence[float | None] | None  # by one function, to one completion


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedTurns:
    """One completion of a group."""

    outcome: float  # R^O; NaN: no function gave one
    total: float  # R^T; NaN: no function gave one
    rewards: Sequence[float]  # [K], NaN: none
    has_result: bool  # a tool or an environment wrote something


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """How the turns of a group share its rewards.

    * `outcome` (GRPO-OR): A^O everywhere.
    * `merged` (GRPO-MR): A^C everywhere, which is plain GRPO on the sum.
    * `turn` (MT-GRPO): A^O + c A^T before the first result of a tool, A^O after it; A^O where there is no result.
    * `cae` (cumulative-reward-induced): A^S before the first result, where R^S = R^T + alpha R^O, and A^O after it; A^S
      where there is no result.
    * `recursive`: A_k = sum over l from k to K-1 of alpha^(l-k) A^I_l, plus alpha^(K-k) A^O, where A^I_l compares the
      rewards of turn l. What the last turn gets is part of its outcome. K must be the same in the whole group.
    * `reward_to_go`: turn k gets alpha^(K-k) R^O + sum over l from k to K of alpha^(l-k) r_l, compared with those of
      all turns of the group.

    Args:
        coefficient: c.
        discount: alpha.
        scaled: divide by the standard deviation; `scale_rewards` of TRL's configuration.
        original: of `turn`, a completion without a result has A^C on all its tokens, as in the authors' code. It has
            another scale than its neighbours' A^O then.
    """

    kind: str = "turn"
    coefficient: float = 1.0
    discount: float = 1.0
    scaled: bool = True
    original: bool = False

    def advantages(self, group: Sequence[RewardedTurns]) -> list[Floats]:
        """Advantages of each turn of each completion; 0 where there was no reward.

        Raises:
            RunRefused: under `recursive`, the completions have different numbers of turns.
        """
        rules: dict[str, Callable[[Sequence[RewardedTurns]], list[Floats]]] = {
            "outcome": lambda group: _everywhere(self._compared(_outcomes(group)), group),
            "merged": lambda group: _everywhere(self._compared(_combined(group)), group),
            "turn": self._by_first_result,
            "cae": self._cumulative,
            "recursive": self._recursive,
            "reward_to_go": self._reward_to_go,
        }
        return [np.nan_to_num(row, nan=0.0) for row in rules[self.kind](group)]

    def _by_first_result(self, group: Sequence[RewardedTurns]) -> list[Floats]:
        of_outcome, of_turns = self._known(_outcomes(group)), self._known(np.array([one.total for one in group]))
        rows = _everywhere(of_outcome, group)
        merged = self._known(_combined(group))
        for index, (row, one) in enumerate(zip(rows, group, strict=True)):
            if one.has_result and len(row):
                row[0] += self.coefficient * of_turns[index]
            elif self.original:
                row[:] = merged[index]
        return rows

    def _cumulative(self, group: Sequence[RewardedTurns]) -> list[Floats]:
        outcomes = _outcomes(group)
        rewards = [_sum([one.total, self.discount * one.outcome]) for one in group]
        of_outcome, of_all = self._known(outcomes), self._known(np.array(rewards))
        rows = _everywhere(of_all, group)
        for index, (row, one) in enumerate(zip(rows, group, strict=True)):
            if one.has_result:
                row[1:] = of_outcome[index]
        return rows

    def _recursive(self, group: Sequence[RewardedTurns]) -> list[Floats]:
        counts = sorted({len(one.rewards) for one in group})
        if len(counts) > 1:
            raise RunRefused(
                f'credit="recursive" compares the rewards of each turn over the completions of a group, and one group '
                f"has completions of {' and '.join(map(str, counts))} turns. Where the policy decides when to stop, "
                'that comparison is biased. Take credit="reward_to_go" or "turn", or make the number of turns fixed.'
            )
        return self.compared_by_index(group)

    def compared_by_index(self, group: Sequence[RewardedTurns]) -> list[Floats]:
        """`recursive`, for any numbers of turns: biased where the policy decides when to stop."""
        most = max(len(one.rewards) for one in group)
        rewards = np.full((len(group), most), np.nan)
        outcomes = _outcomes(group)
        for index, one in enumerate(group):
            count = len(one.rewards)
            rewards[index, : max(0, count - 1)] = one.rewards[:-1]
            outcomes[index] = _sum([outcomes[index], *one.rewards[-1:]])
        of_turn = np.stack([self._known(column) for column in rewards.T], axis=1) if most else rewards
        of_outcome = self._known(outcomes)
        rows = []
        for index, one in enumerate(group):
            row = np.zeros(len(one.rewards))
            later = of_outcome[index]
            for turn in reversed(range(len(row))):
                later = later if turn == len(row) - 1 else of_turn[index, turn] + self.discount * later
                row[turn] = later
            rows.append(row)
        return rows

    def _reward_to_go(self, group: Sequence[RewardedTurns]) -> list[Floats]:
        rows = []
        for one in group:
            row = np.full(len(one.rewards), np.nan)
            later = one.outcome
            for turn in reversed(range(len(row))):
                later = _sum([one.rewards[turn], later if turn == len(row) - 1 else self.discount * later])
                row[turn] = later
            rows.append(row)
        flat = self._compared(np.concatenate(rows))
        return [np.array(part) for part in np.split(flat, np.cumsum([len(row) for row in rows])[:-1])]

    def _known(self, rewards: Floats) -> Floats:
        return np.nan_to_num(self._compared(rewards), nan=0.0)

    def _compared(self, rewards: Floats) -> Floats:
        """A of these rewards; NaN where there is none."""
        known = rewards[~np.isnan(rewards)]
        if not len(known):
            return np.zeros_like(rewards)
        spread = float(known.std(ddof=1)) if len(known) > 1 else 0.0
        return (rewards - known.mean()) / (spread + EPSILON if self.scaled else 1.0)


def per_token(mask: Sequence[int], of_turns: Sequence[float]) -> Floats:
    """Spread the values of turns over their tokens, 0 where a tool wrote. `[1, 0, 1]`, `[a, b]` -> `[a, 0, b]`.

    Raises:
        ValueError: there are not as many values as turns.
    """
    values = np.zeros(len(mask))
    starts = turn_starts(mask)
    if len(starts) != len(of_turns):
        raise ValueError(f"There are {len(of_turns)} values for the {len(starts)} turns of a completion.")
    for start, value in zip(starts, of_turns, strict=True):
        end = next((at for at in range(start, len(mask)) if not mask[at]), len(mask))
        values[start:end] = value
    return values


def turn_starts(mask: Sequence[int]) -> list[int]:
    """Where the runs of 1 begin. `[1, 1, 0, 1]` -> `[0, 3]`."""
    return [at for at, mine in enumerate(mask) if mine and (at == 0 or not mask[at - 1])]


def known_sum(given: Given, name: str) -> float | None:
    """What a function gave a completion, added up; None where it gave nothing.

    Raises:
        ValueError: it gave something else.
    """
    if given is None or isinstance(given, (int, float)):
        return given
    if not isinstance(given, (list, tuple)):
        raise ValueError(
            f"The turn reward {name!r} gave a {type(given).__name__} to a completion. Return one number for each "
            "completion, or a list with one for each turn; None: no reward."
        )
    total = _sum([_number(reward) for reward in given])
    return None if total != total else total


def of_each_turn(given: Given, turns: int, name: str) -> list[float]:
    """What a function gave a completion, as one reward a turn; one number counts for the first turn.

    Raises:
        ValueError: it gave not as many rewards as there are turns.
    """
    if given is None or isinstance(given, (int, float)):
        return [_number(given), *[float("nan")] * (turns - 1)] if turns else []
    if len(given) != turns:
        raise ValueError(
            f"The turn reward {name!r} gave {len(given)} rewards for a completion of {turns} turns. Return one number "
            "for each completion, or a list with one for each turn; None: no reward."
        )
    return [_number(value) for value in given]


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _outcomes(group: Sequence[RewardedTurns]) -> Floats:
    return np.array([one.outcome for one in group], np.float64)


def _combined(group: Sequence[RewardedTurns]) -> Floats:
    return np.array([_sum([one.outcome, one.total]) for one in group])


def _sum(values: Sequence[float]) -> float:
    """Sum those that are known; NaN where none is."""
    known = [value for value in values if value == value]
    return float(sum(known)) if known else float("nan")


def _everywhere(of_completions: Floats, group: Sequence[RewardedTurns]) -> list[Floats]:
    return [np.full(len(one.rewards), value) for value, one in zip(of_completions, group, strict=True)]
