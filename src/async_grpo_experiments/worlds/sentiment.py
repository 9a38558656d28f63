"""Short reviews whose reward is a lexicon: a graded reward on text, without a model that judges.

The reference has read reviews of every mood alike, so half of what it says is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from async_grpo_experiments.worlds.tiny import words_tokenizer

GOOD = ["good", "great", "lovely", "brilliant", "moving", "funny", "warm", "clever"]
BAD = ["bad", "poor", "dull", "awful", "boring", "weak", "cold", "silly"]
THINGS = ["film", "plot", "acting", "music", "ending", "script", "cast", "story"]
OTHERS = ["the", "was", "and", "but", "very", "quite", "i", "found", "it", "."]


def sentiment_reward(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of good words among those that judge; .5 where none does."""
    return [_share(completion.split()) for completion in completions]


def _share(words: Sequence[str]) -> float:
    good, bad = (sum(word in lexicon for word in words) for lexicon in (GOOD, BAD))
    return good / (good + bad) if good + bad else 0.5


def sentiment_tokenizer() -> Any:
    return words_tokenizer([*GOOD, *BAD, *THINGS, *OTHERS])


def reviews(count: int, *, seed: int = 0) -> list[str]:
    """Reviews of three statements: `the plot was quite dull but the cast was lovely . i found it very warm .`"""
    rng = np.random.default_rng(seed)

    def judged() -> str:
        adverb = rng.choice(["", "very ", "quite "])
        return str(adverb) + str(rng.choice([*GOOD, *BAD]))

    def statement() -> str:
        return f"the {rng.choice(THINGS)} was {judged()}"

    return [f"{statement()} {rng.choice(['and', 'but'])} {statement()} . i found it {judged()} ." for _ in range(count)]


def sentiment_rows(count: int, *, seed: int = 1, words: int = 2) -> list[dict[str, str]]:
    """Rows of a dataset: the first words of reviews, as prompts."""
    return [{"prompt": " ".join(review.split()[:words])} for review in reviews(count, seed=seed)]


def train_on_reviews(model: Any, tokenizer: Any, *, steps: int, batch: int = 64, lr: float = 2e-3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for step in range(steps):
        texts = [f"{review} {tokenizer.eos_token}" for review in reviews(batch, seed=1_000 + step)]
        padded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels_BT = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
        loss = model(**padded, labels=labels_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
