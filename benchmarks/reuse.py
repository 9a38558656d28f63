"""Groups that must be generated for an accuracy: each trained on once, or more often.

    python benchmarks/reuse.py --quick                  one seed of the sums at half of the edge: half a minute
    python benchmarks/reuse.py                          all cells; those that are in `--json` are not run again
    python benchmarks/reuse.py --seeds 0 --update-docs  tables of what is there

Where workers are the slow side, time is groups generated, and no clock is needed. Each run is one process with one
thread (`stale_run.py`) at a constant rate. It generates 640 groups of 8 completions and trains on 16 of them in a step
(`half the batch`: 8), so the least number of steps is 40. Groups are K versions old when they are first trained on;
K = 1 where nothing is said.

    reuse r             a step has 16 / r new groups, and those that were new in the r - 1 steps before
    num_iterations r    TRL's: r optimizer steps on each batch of 16 new groups
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import outcomes
from benchmarks.edge import CONSTANT
from benchmarks.edge_report import TITLES, short
from benchmarks.table import describe_machine, machine_line, update_docs

GROUPS, BATCH = 640, 16
STEPS = GROUPS // BATCH
RESULTS = Path(__file__).parent / "results" / "reuse.json"
RATES = {"reverse": (2e-4, 4e-4), "sums": (3e-4, 6e-4)}  # half of the edge, and the edge
SHARES = (0.5, 0.9)  # of what `once` gains


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What a run does with its groups."""

    times: int = 2  # as many steps as with every group once
    reuse: int = 1  # steps in a row that have a group in their batch
    staleness: int = 1  # K
    config: dict[str, Any] = field(default_factory=dict)


ONCE = "once"
COLUMNS = {
    ONCE: Column(times=1),
    "reuse 2": Column(reuse=2),
    "num_iterations 2": Column(config={"num_iterations": 2}),
    "reuse 2, K = 2": Column(reuse=2, staleness=2),
    "num_iterations 2, K = 2": Column(staleness=2, config={"num_iterations": 2}),
    "reuse 4": Column(times=4, reuse=4),
    "num_iterations 4": Column(times=4, config={"num_iterations": 4}),
    "half the batch": Column(config={"per_device_train_batch_size": 64}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    task: str
    rate: float
    column: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    cell: Cell
    curve: list[tuple[int, int, float]]  # steps, groups generated, held-out accuracy
    seconds: float  # of CPU

    def groups_to(self, accuracy: float) -> float:
        """Groups generated until the curve first reaches this accuracy; infinite if it does not."""
        for (_, before, lower), (_, after, upper) in pairwise(self.curve):
            if upper >= accuracy > lower:
                return before + (after - before) * (accuracy - lower) / (upper - lower)
        return math.inf

    def final(self, steps: int | None = None) -> float:
        """The mean accuracy in the last fifth of the run, or of its first so many steps."""
        last = steps or self.curve[-1][0]
        return mean(accuracy for step, _, accuracy in self.curve if 0.8 * last <= step <= last)

    def goal(self, share: float) -> float:
        """The accuracy with this share of what the run gains."""
        start = self.curve[0][2]
        return start + share * (self.final() - start)


def train(cell: Cell) -> Outcome:
    started, column = time.process_time(), COLUMNS[cell.column]
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        import torch
        from benchmarks.stale_run import StaleRun

        from async_grpo.setup.process import keep_freed_memory
        from async_grpo.training.corrections.rule import rule

        torch.set_num_threads(1)
        keep_freed_memory(os.environ)
        run = StaleRun(
            task=cell.task,
            staleness=column.staleness,
            correction=rule("bypass"),
            seed=cell.seed,
            steps=STEPS * column.times,
            output_dir=Path(folder),
            config={**CONSTANT, "learning_rate": cell.rate, **column.config},
            reuse=column.reuse,
            measured_at=range(0, STEPS * column.times + 1, 2 * column.times),
        )
        run.train()
    curve = [(step, run.generated[step], round(accuracy, 4)) for step, accuracy in run.accuracies.items()]
    return Outcome(cell=cell, curve=curve, seconds=round(time.process_time() - started, 1))


HEAD = (
    "| rate | a group is used | groups to 50 % of the gain | to 90 % | of `once`: 50 % | 90 % "
    f"| accuracy after {GROUPS} groups | after {STEPS} steps |\n|{'---|' * 8}"
)


def tables(done: Sequence[Outcome]) -> str:
    parts = [f"{machine_line(describe_machine())}; {len(done)} runs; mean ± standard error (seeds)."]
    for task in RATES:
        lines = [line for rate in RATES[task] for line in _rows(done, task, rate)]
        parts += [f"**{TITLES[task].capitalize()}**", "\n".join([HEAD, *lines])] if lines else []
    return "\n\n".join(parts)


def _rows(done: Sequence[Outcome], task: str, rate: float) -> Iterator[str]:
    there = {(it.cell.rate, it.cell.column, it.cell.seed): it for it in done if it.cell.task == task}
    rows = [(rate, column, column) for column in COLUMNS]
    rows += [(edge, ONCE, "once, at twice the rate") for edge in RATES[task] if edge > rate]
    for its_rate, column, name in rows:
        pairs = [(there.get((its_rate, column, seed)), there.get((rate, ONCE, seed))) for seed in range(1, 100)]
        both = [(it, once) for it, once in pairs if it is not None and once is not None]
        goals = [[(it, once, once.goal(share)) for it, once in both] for share in SHARES]
        groups = [[it.groups_to(goal) for it, _, goal in each] for each in goals]
        of_once = [[it.groups_to(goal) / once.groups_to(goal) for it, once, goal in each] for each in goals]
        finals = [[it.final() for it, _ in both], [it.final(STEPS) for it, _ in both]]
        figures = [figure(each, digits) for two, digits in ((groups, 0), (of_once, 2), (finals, 3)) for each in two]
        if both:
            yield f"| {short(rate)} | {name} | {' | '.join(figures)} |"


def figure(values: Sequence[float], digits: int) -> str:
    """Mean ± standard error of what is finite (how many), and how many are not."""
    finite = [value for value in values if value < math.inf]
    error = f" ± {stdev(finite) / math.sqrt(len(finite)):.{digits}f}" if len(finite) > 1 else ""
    missed = f", {len(values) - len(finite)} never" if len(finite) < len(values) else ""
    return f"{mean(finite or [math.nan]):.{digits}f}{error} ({len(finite)}{missed})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed at one rate, nothing is kept")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--rates", nargs="+", type=int, choices=(0, 1), default=(0, 1), help="half of the edge, edge")
    parser.add_argument("--seeds", type=int, default=5, help="from 1 to this one; 0: only tables of what is there")
    parser.add_argument("--json", type=Path, default=RESULTS, help="cells that are there are not run again")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--update-docs", action="store_true", help="put the tables into the documentation")
    args = parser.parse_args()
    path = None if args.quick else args.json
    entries = json.loads(path.read_text())["cells"] if path and path.exists() else []
    done = [Outcome(**{**entry, "cell": Cell(**entry["cell"])}) for entry in entries]
    each = product(args.rates, range(1, args.seeds + 1), RATES, args.columns)  # an unfinished table has every row
    asked_for = [Cell(task=task, rate=RATES[task][edge], column=name, seed=seed) for edge, seed, task, name in each]
    if args.quick:
        asked_for = [Cell(task="sums", rate=3e-4, column=name, seed=1) for name in list(COLUMNS)[:3]]
    left = [cell for cell in asked_for if cell not in {outcome.cell for outcome in done}]
    for outcome in outcomes(train, left, processes=args.processes, until=math.inf):
        done.append(outcome)
        print(f"{outcome.cell}: {outcome.final():.3f} ({outcome.seconds} s)", file=sys.stderr, flush=True)
        if path:
            lines = ",\n".join(json.dumps(asdict(one)) for one in done)
            path.write_text(f'{{"machine": {json.dumps(describe_machine())}, "cells": [\n{lines}\n]}}\n')
    print(text := tables(done))
    if args.update_docs:
        update_docs("reuse", text)


if __name__ == "__main__":
    main()
