"""What the seeds agree on: at each evaluation, the mean over seeds with its 95% interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from async_grpo.errors import BadFileError
from async_grpo.evals.estimators import Range, mean_with_interval, range_of
from async_grpo_experiments.slots.ledger import FINISHED, Record
from async_grpo_experiments.sweeps.plan import Sweep
from async_grpo_experiments.sweeps.progress import Curves, curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """A figure at a step: the mean over the seeds that have it, with Student's t interval, cut to what it can be."""

    step: int
    n: int
    mean: float
    low: float | None  # None: a single seed has no interval
    high: float | None
    by_seed: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A whole sweep. Only finished runs are counted; all others are named."""

    name: str
    mode: str
    seeds: tuple[int, ...]  # that are counted
    not_counted: dict[str, str]  # seed -> why
    evaluations: dict[str, list[Agreed]]  # by figure
    reward: list[Agreed]  # of training
    headline: str = ""  # the figure of the evaluations to show first; empty without evaluations
    sampling: tuple[str, ...] = ()  # how the evaluations were sampled, in words

    def counted(self) -> str:
        """`n = 3 of 4 seeds (42, 1337, 9999). Not counted: seed 2024, failed: …`"""
        every = len(self.seeds) + len(self.not_counted)
        named = f" ({', '.join(map(str, self.seeds))})" if self.seeds else ""
        missing = "; ".join(f"seed {seed}, {why}" for seed, why in self.not_counted.items())
        return f"n = {len(self.seeds)} of {every} seeds{named}." + (f" Not counted: {missing}." if missing else "")


def agreement(sweep: Sweep, records: Mapping[str, Record]) -> Agreement:
    """Read all runs of the sweep and sum them up."""
    counted: dict[int, Curves] = {}
    missing: dict[str, str] = {}
    for run in sweep.runs:
        record = records.get(run.name)
        if record is None or record.state != FINISHED:
            missing[str(run.seed)] = _why(record)
            continue
        try:
            counted[run.seed] = curves(run)
        except BadFileError as error:
            missing[str(run.seed)] = str(error)
    figures = sorted({name for one in counted.values() for found in one.evaluations.values() for name in found})
    by_figure = {
        figure: agree({seed: _curve(one, figure) for seed, one in counted.items()}, range_of(figure))
        for figure in figures
    }
    return Agreement(
        name=sweep.folder.name,
        mode=sweep.mode,
        seeds=tuple(counted),
        not_counted=missing,
        evaluations=by_figure,
        reward=agree({seed: one.reward for seed, one in counted.items()}),
        headline=next((name for name in (first_figure(counted.values()), *figures) if name in by_figure), ""),
        sampling=tuple(sorted({one.sampling for one in counted.values() if one.evaluations})),
    )


def first_figure(runs: Iterable[Curves]) -> str:
    """The figure of evaluations to show first: the mean reward, unless all runs know what success is."""
    first = {one.headline for one in runs if one.evaluations}
    return first.pop() if len(first) == 1 else "reward_mean"


def agree(curves: Mapping[int, Mapping[int, float]], within: Range | None = None) -> list[Agreed]:
    """Sum up curves, seed -> step -> value, at every step that any of them has; intervals are cut to `within`."""
    return [_at(step, curves, within) for step in sorted({step for curve in curves.values() for step in curve})]


def _at(step: int, curves: Mapping[int, Mapping[int, float]], within: Range | None) -> Agreed:
    values = {str(seed): curve[step] for seed, curve in curves.items() if step in curve}
    found = mean_with_interval(list(values.values()), within)
    return Agreed(step=step, n=len(values), mean=found.value, low=found.low, high=found.high, by_seed=values)


def _curve(one: Curves, figure: str) -> dict[int, float]:
    return {step: found[figure] for step, found in one.evaluations.items() if figure in found}


def _why(record: Record | None) -> str:
    if record is None:
        return "never started"
    return f"{record.state}: {record.why}" if record.why else record.state
