"""The results of an experiment: `final_results.json`, tables in `results.md`, curves in `kl.png`, and a data frame.

from async_grpo_experiments.runner.results import results
results("outputs/star/2026-11-24_01-30-00").groupby(["algo", "eta"])["pass@1"].mean()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import BadFileError
from async_grpo.evals.estimators import Estimate
from async_grpo.rundir.files import space_for, write_json, write_lines
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import as_json, read_shaped, shaped
from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config import ExperimentConfig
from async_grpo_experiments.runner.config_files import config_of
from async_grpo_experiments.runner.graph import FOLDERS, ExperimentJob, jobs_of
from async_grpo_experiments.sweeps.comparison import bootstrap

if TYPE_CHECKING:
    import pandas as pd

RESULT, TRAINED = "result.json", "trained.json"
SHOWN = ("pass@1", "reward_mean", "avg_kl", "avg_kl_per_token")


@dataclass(frozen=True, kw_only=True)
class EvaluatedSet:
    """One evaluation of a job.

    Attributes:
        by_problem: success and mean reward, by index in the dataset.
    """

    dataset: str
    eta: float | None  # strength of guidance; None: there is none
    figures: dict[str, Estimate]
    by_problem: dict[str, tuple[float, ...]] = field(default_factory=dict)
    failed: int = 0

    def value(self, name: str) -> float | None:
        found = self.figures.get(name)
        return None if found is None else found.value


@dataclass(frozen=True, kw_only=True)
class TrainedNote:
    """What `trained.json` of a job's model holds."""

    steps: int
    loss: float


@dataclass(frozen=True)
class EvaluatedLine:
    """An evaluation of a job with what is known of its training."""

    job: ExperimentJob
    evaluation: EvaluatedSet
    trained: TrainedNote | None

    @property
    def name(self) -> str:
        """`QSharp r2, η .1`."""
        algo = f"{self.job.algo} r{self.job.round}" if self.job.algo else "reference"
        sample = f" s{self.job.sample}" if self.job.sample is not None else ""
        return f"{algo}{sample}" + ("" if self.evaluation.eta is None else f", η {self.evaluation.eta:g}")


def lines_of(root: Path, config: ExperimentConfig) -> list[EvaluatedLine]:
    """Every evaluation of a job that is complete, references first. A file that cannot be read is left out."""
    found: list[EvaluatedLine] = []
    for job in jobs_of(config):
        folder = root / "jobs" / job.id
        with suppress(FileNotFoundError, BadFileError):
            if states.manifest_of(folder / FOLDERS["evaluate"]) is None:
                continue
            result = read_object(folder / FOLDERS["evaluate"] / RESULT)
            trained = shaped(TrainedNote, read_object(folder / FOLDERS["train"] / TRAINED)) if job.algo else None
            found += [EvaluatedLine(job, one, trained) for one in shaped(list[EvaluatedSet], result.get("evaluations"))]
    return found


def write_results(root: Path, config: ExperimentConfig) -> None:
    """Write all three files. `DiskFullError` if there is no space."""
    lines = lines_of(root, config)
    jobs = read_shaped(dict[str, dict[str, Any]], root / "job_states.json") or {}
    for line in lines:
        jobs.setdefault(line.job.id, {}).setdefault("evaluations", []).append(as_json(line.evaluation))
        if line.trained is not None:
            jobs[line.job.id]["trained"] = as_json(line.trained)
    write_json(root / "final_results.json", {"config": as_json(config), "jobs": jobs})
    write_lines(root / "results.md", markdown(config, lines))
    if lines:
        _plot(root / "kl.png", lines)


def markdown(config: ExperimentConfig, lines: Sequence[EvaluatedLine]) -> Iterator[str]:
    """A table for each evaluated dataset and family."""
    yield f"# {config.experiment.name}"
    if not lines:
        yield ""
        yield "No job has been evaluated yet."
    for (dataset, family), own in _tables(lines).items():
        known = {name for line in own for name in line.evaluation.figures}
        votes = sorted(name for name in known if name.startswith("maj@") and name != "maj@1")
        columns = [name for name in (*SHOWN[:1], *votes, *SHOWN[1:]) if name in known]
        yield ""
        yield f"## {dataset}, {family}"
        yield ""
        yield f"| | {' | '.join(columns)} | loss | steps |"
        yield f"|---|{'---|' * (len(columns) + 2)}"
        best = _clearly_best(own)
        for line in own:
            cells = [str(line.evaluation.figures.get(name, "")) for name in columns]
            trained = ["", ""] if line.trained is None else [f"{line.trained.loss:.4g}", str(line.trained.steps)]
            name = f"**{line.name}**" if line is best else line.name
            yield f"| {' | '.join([name, *cells, *trained])} |"
        yield ""
        yield _said_of(best)


def _said_of(best: EvaluatedLine | None) -> str:
    if best is None:
        return "None is marked: the 95% interval of the best less the next, paired over problems, holds 0."
    return f"{best.name} is better than the next one: the 95% interval, paired over problems, excludes 0."


def _tables(lines: Sequence[EvaluatedLine]) -> dict[tuple[str, str], list[EvaluatedLine]]:
    found: dict[tuple[str, str], list[EvaluatedLine]] = {}
    for line in lines:
        found.setdefault((line.evaluation.dataset, line.job.family), []).append(line)
    return found


def _clearly_best(lines: Sequence[EvaluatedLine]) -> EvaluatedLine | None:
    """The best line, where it is better than every other one over the problems that both answered."""
    column = 0 if all("pass@1" in line.evaluation.figures for line in lines) else 1  # of `by_problem`'s values
    name = ("pass@1", "reward_mean")[column]
    rated = [line for line in lines if name in line.evaluation.figures]
    if len(rated) < 2:
        return None
    best = max(rated, key=lambda line: line.evaluation.figures[name].value)
    others = [line for line in rated if line is not best]
    return best if all(_is_better(best.evaluation, other.evaluation, column) for other in others) else None


def _is_better(ours: EvaluatedSet, theirs: EvaluatedSet, column: int) -> bool:
    common = sorted({*ours.by_problem} & {*theirs.by_problem})
    if len(common) < 2:
        return False
    found = bootstrap(np.array([ours.by_problem[one][column] - theirs.by_problem[one][column] for one in common]))
    return found.low is not None and found.low > 0


def _plot(path: Path, lines: Sequence[EvaluatedLine]) -> None:
    """The first figure over the KL from the reference: a curve an algorithm over η, the reference at 0."""
    from matplotlib.figure import Figure

    tables = _tables(lines)
    figure = Figure(figsize=(6 * len(tables), 4.5), layout="constrained")
    colours = {algo: f"C{index}" for index, algo in enumerate(dict.fromkeys(line.job.algo for line in lines))}
    for axes, ((dataset, family), own) in zip(np.ravel(figure.subplots(1, len(tables))), tables.items(), strict=True):
        name = "pass@1" if all("pass@1" in line.evaluation.figures for line in own) else "reward_mean"
        for algo, curve in _curves(own, name).items():
            _draw(axes, algo, colours[algo], [(x, line.evaluation.figures[name], line) for x, line in curve])
        axes.set(title=f"{dataset}, {family}", xlabel="KL from the reference, nats a completion", ylabel=name)
        axes.grid(alpha=0.3)
        axes.margins(x=0.08)
    named = {
        name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside right center")
    with space_for(path):
        figure.savefig(path, dpi=120)


def _draw(axes: Any, algo: str, colour: str, points: Sequence[tuple[float, Estimate, EvaluatedLine]]) -> None:
    """One algorithm's points with their intervals, each with its η or its round beside it."""
    xs, ys = [x for x, _, _ in points], [y.value for _, y, _ in points]
    # An interval that is cut at 0 or 1 may begin beside its value, by a rounding.
    low = [0.0 if y.low is None else max(0.0, y.value - y.low) for _, y, _ in points]
    high = [0.0 if y.high is None else max(0.0, y.high - y.value) for _, y, _ in points]
    style = {"fmt": "o-", "color": colour} if algo else {"fmt": "k*", "markersize": 12, "zorder": 5}
    axes.errorbar(xs, ys, (low, high), label=algo or "reference", capsize=2, elinewidth=0.7, **style)
    for x, y, line in points if algo else ():
        eta = line.evaluation.eta
        beside = f"r{line.job.round}" if eta is None else f"η {eta:g}"
        axes.annotate(beside, (x, y.value), (4, -9), textcoords="offset points", fontsize=7)


def _curves(lines: Sequence[EvaluatedLine], name: str) -> Mapping[str, list[tuple[float, EvaluatedLine]]]:
    """The lines whose KL is known, with it, in its order: the reference, a head's last round, a policy's rounds."""
    last = max(line.job.round for line in lines)
    found: dict[str, list[tuple[float, EvaluatedLine]]] = {}
    for line in lines:
        divergence = line.evaluation.value("avg_kl") if line.job.algo else 0.0
        is_shown = line.job.round == last or line.evaluation.eta is None
        if divergence is not None and is_shown and name in line.evaluation.figures:
            found.setdefault(line.job.algo, []).append((divergence, line))
    return {algo: sorted(curve, key=lambda one: one[0]) for algo, curve in found.items()}


def results(folder: Path | str) -> pd.DataFrame:
    """A row for each evaluation of each complete job, with its figures and their intervals."""
    import pandas as pd

    root = Path(folder)
    rows = []
    for line in lines_of(root, config_of(root)):
        job, one = line.job, line.evaluation
        row: dict[str, Any] = {"job": job.id, "algo": job.algo, "family": job.family, "trained_on": job.dataset}
        row |= {"round": job.round, "seed": job.seed, "dataset": one.dataset, "eta": one.eta}
        for name, figure in one.figures.items():
            row |= {name: figure.value, f"{name} low": figure.low, f"{name} high": figure.high}
        rows.append(row | ({} if line.trained is None else as_json(line.trained)))
    return pd.DataFrame(rows)
