"""A proxy reward model, trained on pairs by TRL's `RewardTrainer`, with the bounds that scale its scores to [0, 1].

A proxy is a folder: the model, and `proxy.json` with the bounds. It is trained once; later scores are clipped to
the bounds, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

from async_grpo.errors import UsageError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import as_json, shaped
from async_grpo_experiments.algorithms.protocols import PreferenceSettings, Trained
from async_grpo_experiments.algorithms.rows import Rows
from async_grpo_experiments.algorithms.training import arguments, check_lengths, fit
from async_grpo_experiments.reward_models import Reward, reward_by, reward_of_tokens, scores_of_texts

BOUNDS = "proxy.json"


@dataclass(frozen=True)
class ProxyBounds:
    """The scores that become 0 and 1."""

    low: float
    high: float
    format: int = 1


class Proxy:
    """A trained reward model.

    Attributes:
        clipped: scores so far that were outside of the bounds.
    """

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        self._bounds = shaped(ProxyBounds, read_object(folder / BOUNDS))
        self.clipped = 0

    def scaled(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """A score from 0 to 1 for each text of token ids."""
        low, high = self._bounds.low, self._bounds.high
        scores = (np.array(scores_of_texts(self._model, texts)) - low) / (high - low)
        self.clipped += int(((scores < 0) | (scores > 1)).sum())
        return np.clip(scores, 0, 1).tolist()


def train_proxy(settings: PreferenceSettings, backbone: str, pairs: Rows, out: Path) -> Trained:
    """Train a proxy on the pairs, and save it in `out/proxy`; its bounds are the extremes of their texts."""
    model = AutoModelForSequenceClassification.from_pretrained(
        backbone, num_labels=1, dtype=torch.float32, attn_implementation=settings.attn_impl
    )
    check_lengths(pairs, model.config)
    groups = pairs.groups()
    texts = {
        "chosen_ids": [list(chosen.tokens) for chosen, _ in groups],
        "rejected_ids": [list(rejected.tokens) for _, rejected in groups],
    }
    pad = padding_for(model, [*texts["chosen_ids"], *texts["rejected_ids"]])
    trainer = RewardTrainer(
        model,
        RewardConfig(
            **arguments(settings, out / "proxy_training", group=2)
            | {"max_length": None, "gradient_checkpointing": settings.gradient_checkpointing}
        ),
        data_collator=DataCollatorForPreference(pad_token_id=pad),
        train_dataset=Dataset.from_dict(texts),
        processing_class=AutoTokenizer.from_pretrained(settings.reference),
    )
    model.config.get_text_config().pad_token_id = pad

    def save(folder: Path) -> None:
        trainer.save_model(str(folder))
        scores = scores_of_texts(model.eval(), [row.tokens for row in pairs.items])
        if max(scores) <= min(scores):
            raise UsageError("The proxy scores all texts alike: train it for longer, or on more pairs.")
        write_json(folder / BOUNDS, as_json(ProxyBounds(min(scores), max(scores))))

    return fit(trainer, out / "proxy", save)


def padding_for(model: Any, texts: Sequence[Sequence[int]]) -> int:
    """A token id with which no text ends: a model finds the end by the padding, and the end token counts as well."""
    ends = {text[-1] for text in texts}
    free = next((token for token in range(model.config.vocab_size - 1, -1, -1) if token not in ends), None)
    if free is None:
        raise UsageError("Every token of the vocabulary ends some text, so that none is left to pad them with.")
    return free


def reward_of(folder: Path, reference: str) -> Reward:
    """A reward function for `GRPOTrainer`: the scaled score of a proxy, or the score of any other reward model."""
    tokenizer = AutoTokenizer.from_pretrained(reference)
    if (folder / BOUNDS).exists():
        return reward_of_tokens(Proxy(folder).scaled, tokenizer)
    return reward_by(str(folder), tokenizer)
