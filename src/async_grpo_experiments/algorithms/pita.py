"""PITA: a value head that learns which of two continuations is preferred (arXiv 2507.20067).

P(b ≻ a) = σ(β(r_b − r_a)), so the log-odds of the head, over β, are a difference of values: decoding adds l/(βη). It is
exact at the last token alone, because the logit of a mean is not the log of a mean of exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from async_grpo.errors import UsageError
from async_grpo_experiments.algorithms.heads import ValueGuided, train_head
from async_grpo_experiments.algorithms.protocols import (
    Continuations,
    GuidanceSettings,
    HeadSettings,
    Plan,
    PreferenceSettings,
    Trained,
)
from async_grpo_experiments.algorithms.rows import (
    LabelledRow,
    Preferences,
    Rows,
    pairs_of,
    pairs_plan,
    preferable,
    rows_of,
    varied,
)


@dataclass(frozen=True, kw_only=True)
class PITASettings(HeadSettings, PreferenceSettings):
    """Keys of PITA.

    Attributes:
        label: `both`, as published: the tokens of both continuations; `sampled`: those of the sampled one, whose
            tokens alone follow π.
    """

    loss_type: Literal["bce", "mse", "mle", "bradley_terry"] = "bce"
    guidance: GuidanceSettings = field(default_factory=lambda: GuidanceSettings(mode="log_odds"))
    label: Literal["both", "sampled"] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type not in ("bce", "bradley_terry"):
            raise UsageError(f"PITA learns a probability, not loss_type {self.loss_type}: set bce or bradley_terry.")
        if (self.V_min, self.V_max) != (0, 1):
            raise UsageError("PITA's labels are probabilities: leave V_min at 0 and V_max at 1.")
        if self.loss_type == "bradley_terry" and (self.label == "sampled" or not self.bradley_terry_sampling):
            raise UsageError(
                "loss_type bradley_terry needs whole pairs: set label both and bradley_terry_sampling true."
            )


class PITA(ValueGuided[PITASettings]):
    """PITA from pairs of a greedy and a sampled continuation."""

    def plan(self, problems: int, round_number: int = 1) -> Plan:
        """Pairs from `samples_per_example` cuts of a greedy roll-in, guided from round 2 on."""
        return pairs_plan(self.settings, problems, round_number)

    def rows(self, continuations: Sequence[Continuations], round_number: int = 1) -> Rows:
        """Rows labelled with the probability that they are preferred, or with its draw.

        Prompts all of whose rewards are equal are dropped and counted.
        """
        pairs = [*pairs_of(continuations)]
        values = rows_of(pairs, [preferable(pair, self.settings) for pair in pairs])
        preferences = Preferences(self.settings, round_number)
        items: list[LabelledRow] = []
        for greedy, sampled in zip(values[::2], values[1::2], strict=True):
            chance = preferences.chance(sampled.problem, sampled.label, greedy.label)
            both = [replace(sampled, label=chance), replace(greedy, label=1 - chance)]
            both.sort(key=lambda row: -row.label)
            items += both if self.settings.label == "both" else [replace(sampled, label=chance)]
        return varied(items, values)

    def train(self, rows: Rows, start: Path | None = None, *, out: Path) -> Trained:
        """Train on the rows of all rounds so far, from the head of the round before."""
        beta = self.settings.bradley_terry_beta
        return train_head(self.settings, rows, start, out, kind="preference", beta=beta)
