"""Which lines the plot of an experiment has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_grpo.evals.estimators import Estimate
from async_grpo_experiments.runner.graph import ExperimentJob
from async_grpo_experiments.runner.results import EvaluatedLine, EvaluatedSet, _curves, _plot
from async_grpo_experiments.runner.trained_divergence import divergence_of_groups
from async_grpo_experiments.worlds.enumerable import LENGTH, SEQUENCES, Enumerable, sample
from async_grpo_experiments.worlds.tiny import endless_transformer, words_tokenizer


def line(algo: str, number: int, kl: float | None, eta: float | None = None) -> EvaluatedLine:
    values = {"pass@1": 0.5, **({} if kl is None else {"avg_kl": kl})}
    figures = {name: Estimate(value=value, low=None, high=None, problems=1) for name, value in values.items()}
    job = ExperimentJob(algo=algo, family="tiny", dataset="sums", round=number, seed=0)
    return EvaluatedLine(job, EvaluatedSet(dataset="sums", eta=eta, figures=figures), None)


def test_a_curve_has_the_strengths_of_the_last_round_or_the_rounds_of_a_policy() -> None:
    lines = [
        line("", 0, None),
        *(line("PITA", number, kl, eta) for number in (1, 2) for kl, eta in ((2.0 * number, 0.1), (1.0 * number, 1.0))),
        *(line("DPO", number, 0.5 * number) for number in (1, 2)),
    ]
    curves = {algo: [kl for kl, _ in curve] for algo, curve in _curves(lines, "pass@1").items()}
    assert curves == {"": [0.0], "PITA": [2.0, 4.0], "DPO": [0.5, 1.0]}


def test_a_plot_is_drawn_of_shares_at_their_bounds(tmp_path: Path) -> None:
    first = line("", 0, None)
    figures = {"pass@1": Estimate(value=0.0, low=1e-17, high=0.05, problems=6)}
    at_bound = replace(first, evaluation=replace(first.evaluation, figures=figures))
    _plot(tmp_path / "kl.png", [at_bound, line("DPO", 1, 0.5)])
    assert (tmp_path / "kl.png").read_bytes().startswith(b"\x89PNG")


# --- How far a trained policy is from its reference, by what was sampled of it, where that can be enumerated -----

PROMPT = (3, 1)


def test_the_interval_holds_the_enumerated_divergence() -> None:
    temperature = 0.7
    tokenizer = words_tokenizer("abcdefgh")
    models = [endless_transformer(tokenizer, seed=seed).eval() for seed in (1, 0)]
    worlds = [Enumerable.of_model(model, PROMPT, np.zeros(SEQUENCES), temperature) for model in models]
    policy, reference = (world.reference for world in worlds)
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
