"""Held-out accuracy after a fixed number of steps, by staleness and correction.

    python benchmarks/staleness.py [--quick] [--json FILE] [--plot PNG] [--update-docs]
    python benchmarks/staleness.py --task turns --cells FILE --minutes 10     again and again, until all cells are there

Everything is in one process: a copy of the trainer with the weights of exactly K versions ago generates, the trainer
trains, through the same hooks and the same correction as a real run. (A real run keeps its rollouts fresher than its
bound; here they are as old as can be.) Task and model are the demo's (`sums`, four tokens an answer), or those of
`setups/turns.py` (64 tokens). Every combination is trained with the same seeds. With `--cells` each training run is
written to a file when it is done, and those that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
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

from benchmarks.cells import keep, outcomes, read_outcomes
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
from async_grpo.training.corrections.rule import Rule, rule

RULES: dict[str, Rule] = {
    **{name: rule(name) for name in ("bypass", "decoupled", "tis", "icepop", "trl", "none")},
    "tis, sequence": rule("tis", "sequence"),
    "icepop, sequence": rule("icepop", "sequence"),
    "icepop, geometric": rule("icepop", "geometric"),
}
STALENESS = (0, 1, 4, 8, 16)
SEEDS = (1, 2, 3, 4, 5)
STEPS = {"sums": 80, "turns": 40}
MARKS = {"sums": "staleness", "turns": "staleness-turns"}  # of the tables in the documentation


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run."""

    task: str
    staleness: int
    correction: str  # of `RULES`
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
            task=cell.task,
            staleness=cell.staleness,
            correction=RULES[cell.correction],
            seed=cell.seed,
            steps=cell.steps,
            output_dir=Path(folder),
        ).train()
    return Outcome(cell=cell, accuracy=accuracy, seconds=time.monotonic() - started)


# --- Table and plot ---------------------------------------------------------------------------------------


class Results:
    """Accuracies by staleness and correction. With fresh rollouts all corrections are one loss, trained once."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.accuracies: dict[tuple[int, str], list[float]] = {}
        for outcome in sorted(outcomes, key=lambda one: one.cell.seed):
            key = (outcome.cell.staleness, outcome.cell.correction)
            self.accuracies.setdefault(key, []).append(outcome.accuracy)

    @property
    def seeds(self) -> int:
        """Seeds that every combination has."""
        return min(map(len, self.accuracies.values()))

    def names(self) -> list[str]:
        return [name for name in RULES if any(correction == name for _, correction in self.accuracies)]

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
        staleness = self.staleness()
        lines = [f"| correction | {' | '.join(f'K = {k}' for k in staleness)} |", "|" + "---|" * (1 + len(staleness))]
        for correction in self.names():
            texts = [self._cell(k, correction if k else "bypass") for k in staleness]
            lines.append(f"| `{correction}` | {' | '.join(texts)} |")
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

        for staleness in filter(None, self.staleness()):
            cells = {name: self.accuracies[staleness, name] for name in RULES if (staleness, name) in self.accuracies}
            best = max(cells, key=lambda name: statistics.mean(cells[name]))
            apart = [name for name in cells if name != best and _is_below(cells[name], cells[best])]
            near = [name for name in cells if name not in (best, *apart)]
            text = f"Staleness {staleness}: `{best}` has the highest mean"
            text += f"; not separated from it: {listed(near)}" if near else ""
            yield text + (f"; below it: {listed(apart)}." if apart else ".")


def _is_below(values: Sequence[float], best: Sequence[float]) -> bool:
    """Whether the 95% interval of the difference, seed by seed, leaves out 0."""
    mean, half = interval_95([a - b for a, b in zip(values, best)])  # of the seeds that both have
    return mean + half < 0


def plot(results: Results, path: Path, before: float, steps: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#666666", "#D55E00", "#8C564B", "#000000")
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), dpi=150)
    values = results.staleness()
    for index, (correction, colour) in enumerate(zip(RULES, colours, strict=True)):
        if correction not in results.names():
            continue
        there = [it for it in values if (it, correction if it else "bypass") in results.accuracies]
        measured = [interval_95(results.accuracies[it, correction if it else "bypass"]) for it in there]
        axes.errorbar(
            [values.index(it) + (index - 4) * 0.04 for it in there],  # side by side, not on top of each other
            [mean for mean, _ in measured],
            yerr=[half if half < 1 else 0 for _, half in measured],
            label=correction,
            color=colour,
            linestyle="--" if correction == "none" else "-",
            marker="o",
            markersize=4,
            linewidth=1.5,
            elinewidth=1,
            capsize=2,
        )
    axes.axhline(before, color="#999999", linewidth=1, linestyle=":")
    axes.text(-0.25, before + 0.005, "before training", fontsize=8, color="#666666")
    axes.set_xticks(range(len(values)), [str(staleness) for staleness in values])
    axes.set_xlabel("staleness of every rollout, in policy versions")
    axes.set_ylabel(f"held-out accuracy after {steps} steps")
    axes.set_ylim(math.floor(10 * min(before, *map(min, results.accuracies.values()))) / 10, 1)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def accuracy_before(task: str) -> float:
    from benchmarks.setups import sums, turns

    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer = sums.tiny.build_tokenizer()
        build = sums.tiny.build_model if task == "sums" else turns.build_model
        measure = sums.held_out_accuracy if task == "sums" else turns.held_out_accuracy
        return measure(build(tokenizer), tokenizer)


def all_cells(task: str, *, quick: bool) -> list[Cell]:
    """Seed by seed, so that an unfinished table has every combination."""
    values = (0, 4) if quick else STALENESS
    return [
        Cell(task=task, staleness=staleness, correction=correction, seed=seed, steps=12 if quick else STEPS[task])
        for seed in SEEDS[: 1 if quick else None]
        for staleness in values
        for correction in (RULES if staleness else ("bypass",))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 12 steps, staleness 0 and 4: a minute or two")
    parser.add_argument("--task", choices=STEPS, default="sums", help="sums: 4 tokens an answer; turns: 64")
    parser.add_argument("--cells", type=Path, help="each training run is kept in this file, and not repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training run after so many minutes")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--plot", type=Path, help="draw the table into this PNG file")
    parser.add_argument("--update-docs", action="store_true", help="put table and findings into the documentation")
    args = parser.parse_args()
    cells = all_cells(args.task, quick=args.quick)
    done = [outcome for outcome in read_outcomes(args.cells, Outcome, Cell) if outcome.cell in cells]
    left = [cell for cell in cells if cell not in {outcome.cell for outcome in done}]
    for outcome in outcomes(train, left, processes=args.processes, until=time.monotonic() + 60 * args.minutes):
        done.append(outcome)
        keep(args.cells, outcome)
        cell = outcome.cell
        print(
            f"seed {cell.seed} staleness {cell.staleness:>2} {cell.correction:<17} accuracy {outcome.accuracy:.3f} "
            f"({outcome.seconds:.1f} s; {len(done)} of {len(cells)})",
            file=sys.stderr,
            flush=True,
        )
    report(done, args, before=accuracy_before(args.task), cells=cells)


def report(done: Sequence[Outcome], args: Any, *, before: float, cells: Sequence[Cell]) -> None:
    results = Results(done)
    unfinished = "" if len(done) == len(cells) else f" {len(done)} of {len(cells)} training runs are done."
    told = (
        f"{machine_line(describe_machine())}; {cells[0].steps} steps, {counted(results.seeds, 'seed')}; mean ± half of "
        f"the 95% interval over seeds. Before training: {before:.3f}. The training runs took "
        f"{sum(one.seconds for one in done):.0f} s, one after another.{unfinished}"
    )
    findings = "\n".join(f"- {text}" for text in results.findings())
    print(f"{told}\n\n{results.table()}\n\n{findings}")
    if args.json:
        write_json(args.json, results.rows(), task=args.task, steps=cells[0].steps, seeds=results.seeds, before=before)
    if args.plot:
        plot(results, args.plot, before, cells[0].steps)
    if args.update_docs:
        update_docs(MARKS[args.task], f"{told}\n\n{results.table()}\n\n{findings}")


if __name__ == "__main__":
    main()
