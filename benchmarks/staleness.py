"""Held-out accuracy after a fixed number of steps, by staleness and correction.

    python benchmarks/staleness.py [--quick] [--json FILE] [--plot PNG] [--update-docs]

Everything is in one process: a copy of the trainer with the weights of exactly K versions ago generates, the trainer
trains, through the same hooks and the same correction as a real run. (A real run keeps its rollouts fresher than its
bound; here they are as old as can be.) Task and model are the demo's. Every combination is trained with the same
seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # one combination a core
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import (
    Row,
    describe_machine,
    interval_95,
    machine_line,
    row,
    update_docs,
    write_json,
)

from async_grpo.formatting import counted
from async_grpo.settings import CORRECTIONS

STALENESS = (0, 1, 4, 8, 16)
SEEDS = (1, 2, 3, 4, 5)
STEPS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run."""

    staleness: int
    correction: str
    seed: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    cell: Cell
    accuracy: float
    seconds: float


# --- One run ----------------------------------------------------------------------------------------------


def train(cell: Cell) -> Outcome:
    """Train on rollouts that are exactly `cell.staleness` versions old (fewer in the first steps)."""
    started = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        from benchmarks.stale_run import StaleRun

        accuracy = StaleRun(
            staleness=cell.staleness,
            correction=cell.correction,
            seed=cell.seed,
            steps=cell.steps,
            output_dir=Path(folder),
        ).train()
    return Outcome(cell=cell, accuracy=accuracy, seconds=time.monotonic() - started)


def outcomes(cells: Sequence[Cell]) -> Iterator[Outcome]:
    """Train all, one on each core; in their order, so that seeds can be compared."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(os.sched_getaffinity(0))) as pool:
        yield from pool.imap(train, cells)


# --- Table and plot ---------------------------------------------------------------------------------------


class Results:
    """Accuracies by staleness and correction."""

    def __init__(self) -> None:
        self.accuracies: dict[tuple[int, str], list[float]] = {}

    def add(self, outcome: Outcome) -> None:
        key = (outcome.cell.staleness, outcome.cell.correction)
        self.accuracies.setdefault(key, []).append(outcome.accuracy)

    @property
    def seeds(self) -> int:
        """That every combination has."""
        return min(map(len, self.accuracies.values()))

    def staleness(self) -> list[int]:
        return sorted({staleness for staleness, _ in self.accuracies})

    def rows(self) -> Iterator[Row]:
        for (staleness, correction), values in sorted(self.accuracies.items()):
            mean, half = interval_95(values)
            yield row(
                f"accuracy, staleness {staleness}, {correction}",
                values,
                "",
                note=f"mean {mean:.3f} ± {half:.3f}, {len(values)} seeds",
            )

    def table(self) -> str:
        """Markdown: mean ± half of the 95% interval."""
        lines = [f"| staleness | {' | '.join(CORRECTIONS)} |", "|" + "---|" * (1 + len(CORRECTIONS))]
        for staleness in self.staleness():
            texts = [self._cell(staleness, correction) for correction in CORRECTIONS]
            lines.append(f"| {staleness} | {' | '.join(texts)} |")
        return "\n".join(lines)

    def _cell(self, staleness: int, correction: str) -> str:
        values = self.accuracies.get((staleness, correction))
        if not values:
            return ""
        mean, half = interval_95(values)
        return f"{mean:.3f} ± {half:.3f}" if len(values) > 1 else f"{mean:.3f}"

    def findings(self) -> Iterator[str]:
        """For each staleness: the corrections that are not worse than the best one, as far as the seeds can tell."""

        def listed(names: Sequence[str]) -> str:
            return ", ".join(f"`{name}`" for name in names)

        for staleness in self.staleness():
            cells = {name: self.accuracies[staleness, name] for name in CORRECTIONS}
            best = max(cells, key=lambda name: statistics.mean(cells[name]))
            apart = [name for name in CORRECTIONS if name != best and _is_below(cells[name], cells[best])]
            near = [name for name in CORRECTIONS if name not in (best, *apart)]
            text = f"Staleness {staleness}: `{best}` has the highest mean"
            text += f"; not separated from it: {listed(near)}" if near else ""
            yield text + (f"; below it: {listed(apart)}." if apart else ".")


def _is_below(values: Sequence[float], best: Sequence[float]) -> bool:
    """Whether the 95% interval of the difference, seed by seed, leaves out 0."""
    mean, half = interval_95([a - b for a, b in zip(values, best)])
    return mean + half < 0


def plot(results: Results, path: Path, before: float, steps: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(CORRECTIONS, ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#666666"), strict=True))
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), dpi=150)
    places = results.staleness()
    for index, correction in enumerate(CORRECTIONS):
        measured = [interval_95(results.accuracies[staleness, correction]) for staleness in places]
        axes.errorbar(
            [place + (index - 2) * 0.06 for place in range(len(places))],  # side by side, not on top of each other
            [mean for mean, _ in measured],
            yerr=[half if half < 1 else 0 for _, half in measured],
            label=correction,
            color=colours[correction],
            linestyle="--" if correction == "none" else "-",
            marker="o",
            markersize=4,
            linewidth=1.5,
            elinewidth=1,
            capsize=2,
        )
    axes.axhline(before, color="#999999", linewidth=1, linestyle=":")
    axes.text(-0.25, before + 0.01, "before training", fontsize=8, color="#666666")
    axes.set_xticks(range(len(places)), [str(staleness) for staleness in places])
    axes.set_xlabel("staleness of every rollout, in policy versions")
    axes.set_ylabel(f"held-out accuracy after {steps} steps")
    axes.set_ylim(0, 1)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def accuracy_before() -> float:
    from benchmarks.setups import sums

    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer = sums.tiny.build_tokenizer()
        return sums.held_out_accuracy(sums.tiny.build_model(tokenizer), tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 12 steps, staleness 0 and 4: a minute")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--plot", type=Path, help="draw the table into this PNG file")
    parser.add_argument("--update-docs", action="store_true", help="put table and findings into the documentation")
    args = parser.parse_args()
    started = time.monotonic()
    steps = 12 if args.quick else STEPS
    cells = [
        Cell(staleness=staleness, correction=correction, seed=seed, steps=steps)
        for seed in SEEDS[: 1 if args.quick else None]
        for staleness in STALENESS[: 3 if args.quick else None : 2 if args.quick else None]
        for correction in CORRECTIONS
    ]
    before = accuracy_before()
    results = Results()
    for outcome in outcomes(cells):
        results.add(outcome)
        cell = outcome.cell
        print(
            f"seed {cell.seed} staleness {cell.staleness:>2} {cell.correction:<9} accuracy {outcome.accuracy:.3f} "
            f"({outcome.seconds:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
    report(results, args, before=before, steps=steps, took_s=time.monotonic() - started)


def report(results: Results, args: Any, *, before: float, steps: int, took_s: float) -> None:
    told = (
        f"{machine_line(describe_machine())}; {steps} steps, {counted(results.seeds, 'seed')}; mean ± half of the 95% "
        f"interval over seeds. Before training: {before:.3f}. The run took {took_s:.0f} s."
    )
    findings = "\n".join(f"- {text}" for text in results.findings())
    print(f"{told}\n\n{results.table()}\n\n{findings}")
    if args.json:
        write_json(args.json, results.rows(), steps=steps, seeds=results.seeds, before=before, seconds=round(took_s))
    if args.plot:
        plot(results, args.plot, before, steps)
    if args.update_docs:
        update_docs("staleness", f"{told}\n\n{results.table()}\n\n{findings}")


if __name__ == "__main__":
    main()
