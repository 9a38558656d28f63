"""How far a trained policy is from its reference, by what was sampled of it, where that can be enumerated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_grpo_experiments.runner.trained_divergence import divergence_of_groups
from async_grpo_experiments.worlds.enumerable import LENGTH, SEQUENCES, Enumerable, sample
from async_grpo_experiments.worlds.tiny import endless_transformer, words_tokenizer

PROMPT = (3, 1)


def test_the_interval_holds_the_enumerated_divergence() -> None:
    temperature = 0.7
    tokenizer = words_tokenizer("abcdefgh")
    models = [endless_transformer(tokenizer, seed=seed).eval() for seed in (1, 0)]
    policy, reference = (
        Enumerable.of_model(model, PROMPT, np.zeros(SEQUENCES), temperature).reference for model in models
    )
    rng = np.random.default_rng(0)

    def group(lengths: tuple[int, ...]) -> Any:
        tokens = [row[:length] for row, length in zip(sample(policy, rng, len(lengths)), lengths, strict=True)]
        return SimpleNamespace(
            prompt_ids=np.array(PROMPT, np.int32),
            completion_lengths=np.array(lengths, np.int32),
            completion_ids=np.concatenate(tokens).astype(np.int32),
        )

    wanted = Enumerable(reference, np.zeros(SEQUENCES)).divergence(policy)
    found = divergence_of_groups([group((LENGTH,) * 8) for _ in range(60)], *models, temperature)
    low, high = found["avg_kl"].low, found["avg_kl"].high
    assert low is not None and high is not None and low <= wanted <= high
    assert (found["avg_kl"].problems, high - low < 0.2 * wanted) == (60, True)
    assert found["avg_kl_per_token"].value == pytest.approx(found["avg_kl"].value / LENGTH)
    unequal = divergence_of_groups([group((1, LENGTH, 3))] * 2, *models, temperature)
    assert unequal["avg_kl_per_token"].value == pytest.approx(unequal["avg_kl"].value / 3)
    assert divergence_of_groups([], *models, temperature) == {}
