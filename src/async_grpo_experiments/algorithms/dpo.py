"""DPO: the policy itself learns from pairs, by TRL's `DPOTrainer` (arXiv 2305.18290).

Its loss is softplus(−β(Δ_chosen − Δ_rejected)) at temperature 1, where Δ is log π(y|x) less that of the reference. Of
TRL the private name `_prepare_dataset` is overridden: TRL tokenises text there, and rows are token ids.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from async_grpo.errors import UsageError
from async_grpo.setup.trl_compat import repair_trl
from async_grpo_experiments.algorithms.protocols import Continuations, Plan, PreferenceSettings, Trained
from async_grpo_experiments.algorithms.rows import Rows, best_and_worst, pairs_of, pairs_plan
from async_grpo_experiments.algorithms.training import arguments, check_lengths, fit, load_policy

HOOKS = ("_prepare_dataset",)  # private names of TRL's trainer that are touched here


@dataclass(frozen=True, kw_only=True)
class DPOSettings(PreferenceSettings):
    beta: float = 0.1  # of the loss, in nats per unit of log-ratio; not that of the preferences
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])  # added up; `[sigmoid, sft]` is RPO

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 1:
            raise UsageError(f"DPO's loss is at temperature 1, and temperature is {self.temperature:g}: set it to 1.")


class DPO:
    """DPO from pairs of a greedy and a sampled continuation of one cut."""

    def __init__(self, settings: DPOSettings) -> None:
        self.settings = settings

    def plan(self, problems: int, round_number: int = 1) -> Plan:
        """Pairs as PITA's: from `samples_per_example` cuts of a greedy roll-in."""
        return pairs_plan(self.settings, problems, round_number)

    def rows(self, continuations: Sequence[Continuations], round_number: int = 1) -> Rows:
        """Two rows a pair, the chosen one first. Pairs of equal rewards are dropped and counted."""
        return best_and_worst([*pairs_of(continuations)], self.settings, round_number)

    def train(self, rows: Rows, start: Path | None = None, *, out: Path) -> Trained:
        """Train from the weights of the round before, against the original reference."""
        trainer = self.trainer(rows, start, out)
        return fit(trainer, out / "model", trainer.save_model)

    def trainer(self, rows: Rows, start: Path | None, out: Path) -> DPOTrainer:
        """TRL's trainer for the rows, ready to train."""
        settings = self.settings
        repair_trl()
        reference = load_policy(settings.reference, settings)
        policy = load_policy(str(start), settings) if start else copy.deepcopy(reference)
        check_lengths(rows, policy.config)
        own = {"beta": settings.beta, "loss_type": list(settings.loss_type), "max_length": None}
        own |= {"gradient_checkpointing": settings.gradient_checkpointing}
        return TokenPairsTrainer(
            policy,
            ref_model=reference,
            args=DPOConfig(**arguments(settings, out, group=2) | own),
            train_dataset=as_pairs(rows),
            processing_class=AutoTokenizer.from_pretrained(settings.reference),
        )


class TokenPairsTrainer(DPOTrainer):
    """TRL's DPO for pairs of token ids."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def as_pairs(rows: Rows) -> Dataset:
    """The columns that TRL's collator reads; `chosen_ids` and `rejected_ids` are what follows the cut."""
    pairs = rows.groups()
    return Dataset.from_dict(
        {
            "prompt_ids": [list(chosen.prompt + chosen.prefix) for chosen, _ in pairs],
            "chosen_ids": [list(chosen.continuation) for chosen, _ in pairs],
            "rejected_ids": [list(rejected.continuation) for _, rejected in pairs],
        }
    )
