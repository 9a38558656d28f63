"""QSharp-HF: Q# whose rewards are the scores of a proxy that was trained on pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from async_grpo.errors import UsageError
from async_grpo.log import logger
from async_grpo_experiments.algorithms.heads import ValueGuided, check_returns, train_head
from async_grpo_experiments.algorithms.protocols import Continuations, HeadSettings, Trained
from async_grpo_experiments.algorithms.proxy import Proxy, ProxySettings, proxy_of_round
from async_grpo_experiments.algorithms.rows import Rows, preferable, preferred_pairs, rows_of, varied


@dataclass(frozen=True, kw_only=True)
class QSharpHFSettings(HeadSettings, ProxySettings):
    """Keys of QSharp-HF: `epochs`, `max_steps` and `lr` are of the head, and `proxy` has those of the proxy.

    `guidance.eta` is in units of the proxy's score, which is from 0 to 1.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type != "mle" or (self.V_min, self.V_max) != (0, 1):
            raise UsageError(
                "QSharp-HF learns graded scores from 0 to 1: leave loss_type at mle, V_min at 0, V_max at 1."
            )


class QSharpHF(ValueGuided[QSharpHFSettings]):
    """Q# from preferences, by a proxy. The proxy is trained in round 1, and used with its bounds in all later ones."""

    def rows(self, continuations: Sequence[Continuations], round_number: int = 1) -> Rows:
        """A row a continuation. Its label is for drawing preferences; the head never sees it."""
        return varied(rows_of(continuations, [preferable(found, self.settings) for found in continuations]))

    def train(self, rows: Rows, start: Path | None = None, *, out: Path) -> Trained:
        """Train the proxy, in round 1, and the head on its scores."""
        settings = self.settings
        proxy = Proxy(proxy_of_round(settings, preferred_pairs(rows, settings), start, out))
        scores = proxy.scaled([row.tokens for row in rows.items])
        logger.info("{} of {} scores were outside of the proxy's bounds.", proxy.clipped, len(scores))
        scored = Rows(tuple(replace(row, label=score) for row, score in zip(rows.items, scores, strict=True)))
        check_returns(scored, settings)
        return train_head(settings, scored, start, out)
