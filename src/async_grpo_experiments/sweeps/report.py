"""What the seeds agree on: at each evaluation, the mean over seeds with its 95% interval; and the report of it.

The report is in the folder of the sweep: `report.json`, `report.md`, `agreement.png`, and curves for TensorBoard.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.evals.estimators import Range, mean_with_interval, range_of
from async_grpo.formatting import counted
from async_grpo.rundir.files import space_for, write_json, write_lines
from async_grpo_experiments.sweeps.run_progress import Curves, FinishedRuns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES, DPI = (9.0, 3.6), 110


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


def agreement(found: FinishedRuns, mode: str) -> Agreement:
    runs = found.runs
    figures = sorted({name for one in runs.values() for figures in one.evaluations.values() for name in figures})
    first = first_figure(runs.values())
    return Agreement(
        name=found.name,
        mode=mode,
        seeds=tuple(runs),
        not_counted=dict(found.not_counted),
        evaluations={
            figure: agree({seed: _curve(one, figure) for seed, one in runs.items()}, range_of(figure))
            for figure in figures
        },
        reward=agree({seed: one.reward for seed, one in runs.items()}),
        headline=first if first in figures else next(iter(figures), ""),
        sampling=tuple(sorted({one.sampling for one in runs.values() if one.evaluations})),
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


def write_report(folder: Path, agreement: Agreement) -> None:
    """Write all forms of the report. `DiskFullError` if there is no space for one."""
    write_json(folder / "report.json", asdict(agreement))
    write_lines(folder / "report.md", markdown(agreement))
    if agreement.evaluations or agreement.reward:
        picture = band_plot(agreement)
        with space_for(folder / "agreement.png"):
            (folder / "agreement.png").write_bytes(picture)
        _write_events(folder / "tensorboard", agreement, picture)


def markdown(agreement: Agreement) -> Iterator[str]:
    """What was counted, and a table of each figure."""
    yield from (f"# {agreement.name}", "", *headline(agreement))
    for figure in agreement.evaluations:
        if figure != agreement.headline:
            yield from ("", *_section(agreement, figure))


def headline(agreement: Agreement) -> Iterator[str]:
    """What was counted, and the table of the first figure."""
    yield from (agreement.counted(), "")
    if agreement.headline:
        cut = " Intervals are cut to 0 … 1." if range_of(agreement.headline) else ""
        yield from (f"Evaluations were sampled {' or '.join(agreement.sampling)}.{cut}", "")
        yield from _section(agreement, agreement.headline)
    else:
        yield "No run was evaluated: none finished, the setup file has no eval_dataset, or --eval-every is 0."


def _section(agreement: Agreement, figure: str) -> Iterator[str]:
    yield from (f"## {figure}", "", *_table(agreement.evaluations[figure], agreement.seeds))


def _table(rows: Sequence[Agreed], seeds: Sequence[int]) -> Iterator[str]:
    yield f"| step | n | mean | 95% interval | {' | '.join(f'seed {seed}' for seed in seeds)} |"
    yield "|" + "---|" * (4 + len(seeds))
    for row in rows:
        values = [f"{row.by_seed[str(seed)]:.3f}" if str(seed) in row.by_seed else "" for seed in seeds]
        yield f"| {row.step} | {row.n} | {row.mean:.3f} | {interval(row)} | {' | '.join(values)} |"


def interval(row: Agreed) -> str:
    """`0.912 … 0.954`; empty for a single seed."""
    return "" if row.low is None or row.high is None else f"{row.low:.3f} … {row.high:.3f}"


def band_plot(agreement: Agreement) -> bytes:
    """A PNG: evaluations and the reward of training, each seed as a thin line, the mean with its interval as a band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(name.replace("_", " "), agreement.evaluations[name]) for name in [agreement.headline] if name]
    panels += [("reward of training", agreement.reward)] if agreement.reward else []
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for index, (title, rows) in enumerate(panels):
        _draw(figure.add_subplot(1, len(panels), index + 1), title, rows, agreement.seeds)
    figure.suptitle(
        f"{agreement.name}: mean and 95% interval over {counted(len(agreement.seeds), 'seed')}", fontsize=10
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def _draw(axes: Axes, title: str, rows: Sequence[Agreed], seeds: Sequence[int]) -> None:
    for seed in seeds:
        points = [(row.step, row.by_seed[str(seed)]) for row in rows if str(seed) in row.by_seed]
        axes.plot(*zip(*points), linewidth=0.7, alpha=0.6, color="0.5", label="each seed" if seed == seeds[0] else None)
    steps = [row.step for row in rows]
    axes.plot(steps, [row.mean for row in rows], linewidth=1.8, color="tab:blue", label="mean")
    band = [(row.step, row.low, row.high) for row in rows if row.low is not None and row.high is not None]
    at, low, high = ([row[part] for row in band] for part in range(3))
    if band:
        axes.fill_between(at, low, high, alpha=0.2, color="tab:blue", linewidth=0, label="95% interval")
    values = [value for row in rows for value in row.by_seed.values()]
    margin = 0.05 * (max(values) - min(values)) or 0.05
    axes.set_ylim(min(values) - margin, max(values) + margin)  # an interval of two seeds may be far wider
    axes.set_xlabel("optimizer step")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(alpha=0.3)


def _write_events(root: Path, agreement: Agreement, picture: bytes) -> None:
    from async_grpo.reports.board import EventFiles

    files, at = EventFiles(root), time.time()
    with space_for(root):
        for tag, row in _tagged(agreement):
            for folder, value in (("mean", row.mean), ("low", row.low), ("high", row.high)):
                if value is not None:
                    files.scalar(folder, tag, value, row.step, at)
        files.image("mean", "agreement", picture, 0, at)
        files.flush()
        files.close()


def _tagged(agreement: Agreement) -> Iterator[tuple[str, Agreed]]:
    for name, rows in agreement.evaluations.items():
        yield from ((f"eval/{name}", row) for row in rows)
    yield from (("train/reward", row) for row in agreement.reward)
