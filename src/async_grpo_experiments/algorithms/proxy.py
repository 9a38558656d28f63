"""A proxy reward model, trained on pairs by TRL's `RewardTrainer`, with the bounds that scale its scores to [0, 1].

A proxy is a folder: the model, and `proxy.json` with the bounds and with how it does on pairs that it was not trained
on. It is trained once; later scores are clipped to the bounds, and counted.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig, RewardTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference

from async_grpo.errors import UsageError
from async_grpo.evals.estimators import mean_with_interval
from async_grpo.log import logger
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import as_json, shaped
from async_grpo_experiments.algorithms.protocols import PreferenceSettings, Trained
from async_grpo_experiments.algorithms.rows import LabelledRow, Rows
from async_grpo_experiments.algorithms.training import arguments, check_lengths, fit
from async_grpo_experiments.reward_models import Reward, reward_by, reward_of_tokens, scores_of_texts

RECORD = "proxy.json"

HELD_OUT = 0.1  # of the prompts


@dataclass(frozen=True, kw_only=True)
class ProxyTraining:
    """Keys of the proxy's own training; the others are the algorithm's."""

    epochs: float = 3  # passes over the pairs, whatever the algorithm's `max_steps`
    lr: float | None = None  # None: the algorithm's

    def __post_init__(self) -> None:
        for name in ("epochs", "lr"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"proxy.{name} must be over 0, got {value:g}.")


@dataclass(frozen=True, kw_only=True)
class ProxySettings(PreferenceSettings):
    """Keys of the algorithms that train a proxy."""

    value: str | None = None  # the model whose backbone the proxy begins from; None: the reference
    proxy: ProxyTraining = field(default_factory=ProxyTraining)  # to be raised while the share of held-out pairs rises


@dataclass(frozen=True)
class ProxyRecord:
    """What is known of a proxy."""

    low: float  # the score that becomes 0
    high: float  # the score that becomes 1
    held_out_pairs: int = 0  # pairs of prompts that it was not trained on
    held_out_right: float | None = None  # the share of them whose chosen text scores higher; None: there are none
    format: int = 1


class Proxy:
    """A trained reward model.

    Attributes:
        record: what its file says.
        clipped: scores so far that were outside of the bounds.
    """

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        self.record = shaped(ProxyRecord, read_object(folder / RECORD))
        self.clipped = 0

    def scaled(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """A score from 0 to 1 for each text of token ids."""
        low, high = self.record.low, self.record.high
        scores = (np.array(scores_of_texts(self._model, texts)) - low) / (high - low)
        self.clipped += int(((scores < 0) | (scores > 1)).sum())
        return np.clip(scores, 0, 1).tolist()


def proxy_of_round(settings: ProxySettings, pairs: Rows, start: Path | None, out: Path) -> Path:
    """The folder of the proxy in `out`: round 1 trains it on the pairs, and later ones copy it from beside `start`."""
    if start is None:
        return train_proxy(settings, pairs, out).folder
    return shutil.copytree(start.parent / "proxy", out / "proxy")


def train_proxy(settings: ProxySettings, pairs: Rows, out: Path) -> Trained:
    """Train a proxy on the pairs, and save it in `out/proxy`; its bounds are the extremes of their texts.

    The pairs of a tenth of the prompts are held out, and tell how good it is.
    """
    own = settings.proxy
    settings = replace(settings, epochs=own.epochs, max_steps=-1, lr=settings.lr if own.lr is None else own.lr)
    set_seed(settings.seed)  # its last layer begins at random
    model = AutoModelForSequenceClassification.from_pretrained(
        settings.value or settings.reference, num_labels=1, dtype=torch.float32, attn_implementation=settings.attn_impl
    )
    check_lengths(pairs, model.config)
    trained_on, held_out = split_by_prompt(pairs, settings.seed)
    pad = padding_for(model, [row.tokens for row in pairs.items])
    trainer = RewardTrainer(
        model,
        RewardConfig(
            **arguments(settings, out / "proxy_training", group=2)
            | {"max_length": None, "gradient_checkpointing": settings.gradient_checkpointing}
        ),
        data_collator=DataCollatorForPreference(pad_token_id=pad),
        train_dataset=Dataset.from_dict(
            {
                "chosen_ids": [list(chosen.tokens) for chosen, _ in trained_on],
                "rejected_ids": [list(rejected.tokens) for _, rejected in trained_on],
            }
        ),
        processing_class=AutoTokenizer.from_pretrained(settings.reference),
    )
    model.config.get_text_config().pad_token_id = pad

    def save(folder: Path) -> None:
        trainer.save_model(str(folder))
        model.eval()
        scores = scores_of_texts(model, [row.tokens for row in pairs.items])
        if max(scores) <= min(scores):
            raise UsageError("The proxy scores all texts alike: train it for longer, or on more pairs.")
        right = right_pairs(model, held_out)
        share = sum(right) / len(right) if right else None
        write_json(folder / RECORD, as_json(ProxyRecord(min(scores), max(scores), len(right), share)))

    return fit(trainer, out / "proxy", save)


def split_by_prompt(pairs: Rows, seed: int) -> tuple[list[list[LabelledRow]], list[list[LabelledRow]]]:
    """The pairs to train on, and those of a tenth of the prompts, which are drawn."""
    groups = pairs.groups()
    prompts = list(dict.fromkeys(group[0].prompt for group in groups))
    drawn = np.random.default_rng(seed).permutation(len(prompts))[: int(HELD_OUT * len(prompts))]
    held_out = {prompts[index] for index in drawn}
    return (
        [group for group in groups if group[0].prompt not in held_out],
        [group for group in groups if group[0].prompt in held_out],
    )


def right_pairs(model: Any, pairs: Sequence[Sequence[LabelledRow]]) -> list[float]:
    """1 for each pair whose chosen text has the higher score, else 0; says how many, and warns where it is chance."""
    chosen, rejected = (scores_of_texts(model, [pair[index].tokens for pair in pairs]) for index in (0, 1))
    right = [float(better > worse) for better, worse in zip(chosen, rejected, strict=True)]
    if not right:
        logger.warning("Nothing says how good the proxy is: of fewer than 10 prompts no pair is held out.")
        return right
    found = mean_with_interval(right, (0.0, 1.0))
    logger.info("The proxy orders {:.1%} of {} held-out pairs as they were labelled.", found.value, len(right))
    if found.low is None or found.low <= 0.5:
        logger.warning(
            "That may be chance (95% {}): raise proxy.epochs or proxy.lr, take more problems, or draw preferences that "
            "are surer (bradley_terry_beta, bradley_terry_sampling).",
            found.interval or "unknown",
        )
    return right


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
    if (folder / RECORD).exists():
        return reward_of_tokens(Proxy(folder).scaled, tokenizer)
    return reward_by(str(folder), tokenizer)
