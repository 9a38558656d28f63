"""Q#: a value head that learns the distribution of the return behind a cut (arXiv 2502.20548).

Decoding with it is π*(a|s) ∝ π(a|s)·E_π[exp(z/η) | sa], the optimum of E_q[R] − η·KL(q‖π).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import UsageError
from async_grpo_experiments.algorithms.heads import ValueGuided, check_returns, train_head
from async_grpo_experiments.algorithms.protocols import Continuations, HeadSettings, Trained
from async_grpo_experiments.algorithms.rows import Rows, rows_of, varied


@dataclass(frozen=True, kw_only=True)
class QSharpSettings(HeadSettings):
    """Keys of Q#: mle with histogram by default; bce with bernoulli is for rewards that are V_min or V_max."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type == "bradley_terry" or self.guidance.mode == "log_odds":
            raise UsageError(
                "Q# learns returns, and bradley_terry and log_odds are of preferences: take PITA for them."
            )


class QSharp(ValueGuided[QSharpSettings]):
    """Q# from rewards.

    Example:
        >>> trained = QSharp(QSharpSettings(reference="outputs/reference")).train(rows, out=Path("outputs/qsharp"))
    """

    def rows(self, continuations: Sequence[Continuations], round_number: int = 1) -> Rows:
        """A row a continuation, labelled with its reward. Prompts all of whose rewards are equal are dropped."""
        return varied(rows_of(continuations, [found.rewards for found in continuations]))

    def train(self, rows: Rows, start: Path | None = None, *, out: Path) -> Trained:
        """Train on the rows of all rounds so far, from the head of the round before."""
        check_returns(rows, self.settings)
        return train_head(self.settings, rows, start, out)
