"""How many steps later stale rollouts reach the accuracy that plain TRL has: a lag, at half the largest rate it bears.

    python benchmarks/steps_behind.py --quick                     one seed of the sums, fresh and K = 4: half a minute
    python benchmarks/steps_behind.py [--minutes 10] --update-docs

Cells are those of `edge.py`, with `bypass`, and the accuracy is measured on the way as well. The levels are shares of
what plain TRL gains with the same seed, from before the training to the mean of its last steps. Between two measured
steps the accuracy is taken as a straight line. Each cell is written to `--json` when it is done, and those that are
there are not run again.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import outcomes
from benchmarks.edge import train
from benchmarks.edge_report import PLAIN, TITLES, Cell, Outcome, read, short, write
from benchmarks.table import describe_machine, machine_line, update_docs

from async_grpo.formatting import counted

MEASURED_AT = (*range(0, 41, 2), 45, 50, 55, 60)
LAST = 5  # measured steps, whose mean is what plain TRL reaches
LEVELS = (0.5, 0.9)  # of plain TRL's gain
RATES = {"reverse": 2e-4, "sums": 3e-4}  # half the largest at which plain TRL holds
STALENESS = (1, 2, 4, 8)
SEEDS = (1, 2, 3, 4, 5)
RESULTS = Path(__file__).parent / "results" / "steps_behind.json"

QUICK = [Cell(task="sums", column=column, staleness=k, rate=3e-4, seed=1) for column, k in ((PLAIN, 0), ("bypass", 4))]


def all_cells() -> list[Cell]:
    """Seed by seed, so that an unfinished table has every row."""
    kinds = [(PLAIN, 0), *(("bypass", staleness) for staleness in STALENESS)]
    return [
        Cell(task=task, column=column, staleness=staleness, rate=rate, seed=seed)
        for seed in SEEDS
        for task, rate in RATES.items()
        for column, staleness in kinds
    ]


# --- Figures ----------------------------------------------------------------------------------------------


def first_step(accuracies: Sequence[float], level: float) -> float:
    """The step at which a run is at `level` for the first time; infinite where it never is."""
    if accuracies[0] >= level:
        return MEASURED_AT[0]
    for (before, low), (step, high) in pairwise(zip(MEASURED_AT, accuracies, strict=True)):
        if high >= level:
            return before + (step - before) * (level - low) / (high - low)
    return math.inf


def steps_behind(stale: Sequence[float], plain: Sequence[float], share: float) -> float:
    """Steps between plain TRL's reaching `share` of its gain, and the stale run's being as accurate."""
    level = plain[0] + share * (mean(plain[-LAST:]) - plain[0])
    return first_step(stale, level) - first_step(plain, level)


def table(done: Sequence[Outcome]) -> str:
    """Markdown: mean ± standard error (seeds), and whether the mean is at most K + 1."""
    heads = [f"at {share:.0%} of the gain" for share in LEVELS]
    lines = [f"| steps behind plain TRL | {' | '.join(heads)} | target |", "|---|" + "---|" * (1 + len(LEVELS))]
    for task, rate in RATES.items():
        for staleness in STALENESS:
            if texts := list(_figures(done, task, staleness)):
                name = f"{TITLES[task]}, {short(rate)}, K = {staleness}"
                lines.append(f"| {name} | {' | '.join(texts)} | ≤ {staleness + 1} |")
    return "\n".join(lines)


def _figures(done: Sequence[Outcome], task: str, staleness: int) -> Iterator[str]:
    runs = {(one.cell.staleness, one.cell.seed): one.accuracies for one in done if one.cell.task == task}
    seeds = [seed for k, seed in runs if k == staleness and (0, seed) in runs]
    for share in LEVELS if seeds else ():
        behind = [steps_behind(runs[staleness, seed], runs[0, seed], share) for seed in seeds]
        reached = [steps for steps in behind if steps < math.inf]
        yield _figure(reached, staleness + 1, never=len(behind) - len(reached))


def _figure(values: Sequence[float], most: float, *, never: int) -> str:
    told = [f"{never} never"] if never else []
    if values:
        spread = f" ± {stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
        told.insert(0, f"{mean(values):.1f}{spread} ({len(values)})")
    return ", ".join(told) + (", missed" if never or mean(values) > most else "")


def report(done: Sequence[Outcome]) -> str:
    told = f"{machine_line(describe_machine())}; {counted(len(done), 'run')}; mean ± standard error (seeds)."
    return f"{told}\n\n{table(done)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed of the sums, nothing is kept")
    parser.add_argument("--no-runs", action="store_true", help="only the table of the cells that are there")
    parser.add_argument("--json", type=Path, default=RESULTS, help="cells that are there are not run again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many minutes")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--update-docs", action="store_true", help="put the table into the documentation")
    args = parser.parse_args()
    path = None if args.quick else args.json
    done = read(path)
    left = [] if args.no_runs else [it for it in (QUICK if args.quick else all_cells()) if it not in _cells(done)]
    until = time.monotonic() + 60 * args.minutes
    for outcome in outcomes(partial(train, measured_at=MEASURED_AT), left, processes=args.processes, until=until):
        done.append(outcome)
        write(path, done)
        print(f"{outcome.cell}: {outcome.accuracies[-1]:.3f} ({outcome.seconds} s)", file=sys.stderr, flush=True)
    text = report(done)
    print(text)
    if args.update_docs:
        update_docs("steps-behind", text)


def _cells(done: Sequence[Outcome]) -> set[Cell]:
    return {outcome.cell for outcome in done}


if __name__ == "__main__":
    main()
