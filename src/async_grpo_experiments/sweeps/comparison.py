"""Two sweeps: how much better the one is, over seeds and over problems, and what so few seeds can show at all."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from async_grpo.errors import UsageError
from async_grpo.evals.estimators import CONFIDENCE, Estimate, Range, mean_with_interval, range_of_difference
from async_grpo.formatting import counted
from async_grpo_experiments.slots import ledger
from async_grpo_experiments.slots.ledger import LEDGER
from async_grpo_experiments.sweeps import plan
from async_grpo_experiments.sweeps.report import first_figure
from async_grpo_experiments.sweeps.run_progress import Curves, FinishedRuns, finished_runs

RESAMPLES = 10_000
FIGURES = ("success_rate", "reward_mean")  # in the order of `by_problem`'s values
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A less B. Intervals that cannot be computed are None."""

    figure: str
    step: int
    paired: bool  # over seeds: the same ones on both sides
    seeds: tuple[int, ...]  # of the pairs, or of all runs
    a: float
    b: float
    by_pair: dict[str, float]  # seed -> difference
    over_seeds: Estimate  # if other seeds had been drawn
    over_problems: Estimate | None  # if other problems had been asked; None: no run has values by problem
    sign_test: float | None  # exact, two-sided; None without pairs
    smallest_possible: float | None  # the least that such a test can give with so many pairs


def side(folder: Path) -> FinishedRuns:
    """The runs of the sweep in a folder. `RunDirError` if there is none."""
    path = plan.find(folder)
    return finished_runs(plan.load(path), ledger.read(path / LEDGER), str(path))


def compare(a: FinishedRuns, b: FinishedRuns, *, figure: str | None = None, step: int | None = None) -> Effect:
    """The difference of a figure, at the last step that all runs of both sides evaluated.

    Raises:
        UsageError: there is no such figure or step.
    """
    common = tuple(seed for seed in a.runs if seed in b.runs)
    paired = len(common) >= 2
    ours = [a.runs[seed] for seed in common] if paired else [*a.runs.values()]
    theirs = [b.runs[seed] for seed in common] if paired else [*b.runs.values()]
    if not ours or not theirs:
        raise UsageError(f"{(b if ours else a).name} has no finished run, so there is nothing to compare.")
    figure = figure or _figure([*ours, *theirs])
    step = _step([*ours, *theirs], figure, step)
    mine, other = ([one.evaluations[step][figure] for one in one_side] for one_side in (ours, theirs))
    pairs = [x - y for x, y in zip(mine, other, strict=True)] if paired else []
    within = range_of_difference(figure)
    return Effect(
        figure=figure,
        step=step,
        paired=paired,
        seeds=common if paired else (*a.runs, *b.runs),
        a=fmean(mine),
        b=fmean(other),
        by_pair={str(seed): value for seed, value in zip(common, pairs)},
        over_seeds=mean_with_interval(pairs, within) if paired else welch(mine, other, within),
        over_problems=_over_problems(ours, theirs, step, figure),
        sign_test=sign_test(pairs) if paired else None,
        smallest_possible=smallest_sign_test(len(pairs)) if paired else None,
    )


def _figure(runs: Sequence[Curves]) -> str:
    for figure in (first_figure(runs), *FIGURES):
        if all(any(figure in found for found in one.evaluations.values()) for one in runs):
            return figure
    raise UsageError("The two sweeps have no evaluation in common. Both need an eval_dataset and --eval-every over 0.")


def _step(runs: Sequence[Curves], figure: str, wanted: int | None) -> int:
    every = [{step for step, found in one.evaluations.items() if figure in found} for one in runs]
    common = set.intersection(*every)
    if wanted is None and common:
        return max(common)
    if wanted is not None and wanted in common:
        return wanted
    steps = ", ".join(map(str, sorted(common))) or "none"
    raise UsageError(f"Not all runs evaluated {figure} at that step. The steps that all have: {steps}.")


def welch(ours: Sequence[float], theirs: Sequence[float], within: Range | None = None) -> Estimate:
    """The difference of two means of independent samples, with Welch's interval cut to `within`; none for one run."""
    from scipy.stats import ttest_ind

    value, runs = fmean(ours) - fmean(theirs), len(ours) + len(theirs)
    if min(len(ours), len(theirs)) < 2:
        return Estimate(value=value, low=None, high=None, problems=runs)
    if len({*ours}) == len({*theirs}) == 1:  # no spread
        return Estimate(value=value, low=value, high=value, problems=runs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all runs of one side reached the same: the interval holds
        low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(CONFIDENCE)
    least, most = within or (-math.inf, math.inf)
    return Estimate(value=value, low=max(least, float(low)), high=min(most, float(high)), problems=runs)


def _over_problems(ours: Sequence[Curves], theirs: Sequence[Curves], step: int, figure: str) -> Estimate | None:
    """The bootstrap interval of the mean difference, over the problems that every run answered."""
    if figure not in FIGURES:
        return None
    found = [[one.by_problem.get(step, {}) for one in one_side] for one_side in (ours, theirs)]
    problems = sorted(set.intersection(*(set(values) for values in (*found[0], *found[1]))))
    if len(problems) < 2:
        return None
    index = FIGURES.index(figure)
    means = [np.array([[values[p][index] for p in problems] for values in one]).mean(axis=0) for one in found]
    return bootstrap(means[0] - means[1])


def bootstrap(differences: np.ndarray) -> Estimate:
    """The mean and its percentile interval, with problems resampled `RESAMPLES` times (Efron and Tibshirani 1993,
    "An Introduction to the Bootstrap", chapter 13). The same figures for the same input."""
    draws = np.random.default_rng(0)
    count = len(differences)
    means = [float(differences[draws.integers(count, size=count)].mean()) for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value=float(differences.mean()), low=float(low), high=float(high), problems=count)


def sign_test(pairs: Sequence[float]) -> float:
    """The exact two-sided sign test; pairs without a difference say nothing and are left out."""
    from scipy.stats import binomtest

    signs = [pair > 0 for pair in pairs if pair != 0]
    return float(binomtest(sum(signs), len(signs)).pvalue) if signs else 1.0


def smallest_sign_test(pairs: int) -> float:
    """What the test gives if all pairs have the same sign: 2 / 2^n."""
    return min(1.0, 2.0 ** (1 - pairs))


def in_words(effect: Effect, a: FinishedRuns, b: FinishedRuns) -> Iterator[str]:
    """The comparison, a fact a line."""
    how = f"paired over seeds {', '.join(map(str, effect.seeds))}" if effect.paired else "not paired: other seeds"
    yield f"A {a.name}"
    yield f"B {b.name}"
    yield f"{effect.figure} at step {effect.step}, {how}"
    for name, one in (("A", a), ("B", b)):
        left_out = [str(seed) for seed in one.runs if effect.paired and seed not in effect.seeds]
        yield from (f"not counted: seed {seed} of {name}, {why}" for seed, why in one.not_counted.items())
        if left_out:
            yield f"not counted: seed {', '.join(left_out)} of {name}, which the other sweep lacks"
    yield from _not_the_end(effect, a, b)
    sampled = [sorted({one.sampling for one in each.runs.values()}) for each in (a, b)]
    if sampled[0] != sampled[1]:
        yield f"Mind: A's completions were sampled {_or(sampled[0])}, B's {_or(sampled[1])}."
    if a.dataset != b.dataset:
        yield (
            f"Mind: A has --dataset {a.dataset or '(none)'}, B {b.dataset or '(none)'}. Problems are told apart by "
            "their place in the eval_dataset, so if the two differ, neither interval means anything."
        )
    yield f"A {effect.a:.4f}, B {effect.b:.4f}, A - B {effect.over_seeds.value:+.4f}"
    yield f"95% interval over {_number(effect)}: {_interval(effect.over_seeds)}"
    if effect.over_problems is not None:
        of = counted(effect.over_problems.problems, "problem")
        yield f"95% interval over {of} (bootstrap): {_interval(effect.over_problems)}"
    else:
        yield (
            f"No interval over problems: the runs have no two problems in common with a value of {effect.figure} each "
            f"(evaluations.jsonl keeps {' and '.join(FIGURES)} by problem; TRL's own evaluation keeps none)."
        )
    if effect.sign_test is not None and effect.smallest_possible is not None:
        yield f"exact sign test over {counted(len(effect.by_pair), 'pair')}: p = {effect.sign_test:.3g}"
        if effect.smallest_possible > SIGNIFICANT:
            yield (
                f"With {counted(len(effect.by_pair), 'seed')} an exact sign test cannot go below "
                f"{effect.smallest_possible:g}, whatever the runs show: it takes six pairs for 0.05."
            )


def _not_the_end(effect: Effect, a: FinishedRuns, b: FinishedRuns) -> Iterator[str]:
    """Where no run of a side ended at the step: sweeps of other lengths may share only the one before training."""
    last, of_b = (max(max(one.evaluations) for one in side.runs.values()) for side in (a, b))
    if effect.step < min(last, of_b):
        where = "before training" if effect.step == 0 else "not the end"
        yield f"Mind: step {effect.step} is {where}: the last evaluation of A is at step {last}, of B at step {of_b}."


def _or(texts: Sequence[str]) -> str:
    return " or ".join(text or "in an unknown way" for text in texts)


def _number(effect: Effect) -> str:
    return counted(len(effect.by_pair), "pair") if effect.paired else f"{counted(len(effect.seeds), 'run')} (Welch)"


def _interval(found: Estimate) -> str:
    if found.low is None or found.high is None:
        return "none, for a single seed"
    return f"{found.low:+.4f} … {found.high:+.4f}"
