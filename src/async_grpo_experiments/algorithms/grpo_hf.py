"""GRPO-HF: GRPO whose reward is a proxy that was trained on the best and the worst of each group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from async_grpo_experiments.algorithms.grpo import GRPO, GRPOSettings
from async_grpo_experiments.algorithms.protocols import Continuations, Cut, Plan, Trained
from async_grpo_experiments.algorithms.proxy import ProxySettings, proxy_of_round
from async_grpo_experiments.algorithms.rows import NO_ROWS, Rows, best_and_worst, number_of_problems


@dataclass(frozen=True, kw_only=True)
class GRPOHFSettings(GRPOSettings, ProxySettings):
    """Keys of GRPO-HF: `epochs`, `max_steps` and `lr` are of the policy, and `proxy` has those of the proxy."""


class GRPOHF:
    """GRPO from preferences, by a proxy that round 1 trains."""

    def __init__(self, settings: GRPOHFSettings, problems: Sequence[dict[str, Any]]) -> None:
        self.settings = settings
        self._problems = problems

    def plan(self, problems: int, round_number: int = 1) -> Plan:
        """`samples_per_prompt` completions of each problem, in round 1 alone: later ones have their proxy."""
        wanted = range(number_of_problems(self.settings, problems) if round_number == 1 else 0)
        yield [Cut(problem=problem, count=self.settings.samples_per_prompt) for problem in wanted]

    def rows(self, continuations: Sequence[Continuations], round_number: int = 1) -> Rows:
        """A pair of the best and the worst of each group. Groups of equal rewards are dropped and counted."""
        return best_and_worst(continuations, self.settings) if continuations else NO_ROWS

    def train(self, rows: Rows, start: Path | None = None, *, out: Path) -> Trained:
        """Train the proxy, in round 1, and run GRPO with its scores as rewards."""
        settings = self.settings
        proxy = proxy_of_round(settings, rows, start, out)
        online = GRPOSettings(**{key.name: getattr(settings, key.name) for key in fields(GRPOSettings)})
        return GRPO(online, self._problems, str(proxy)).train(NO_ROWS, start, out=out)
