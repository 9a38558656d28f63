"""Which lines the plot of an experiment has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from async_grpo.evals.estimators import Estimate
from async_grpo_experiments.runner.graph import ExperimentJob
from async_grpo_experiments.runner.results import EvaluatedLine, EvaluatedSet, _curves, _plot


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
