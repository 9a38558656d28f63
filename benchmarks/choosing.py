"""Prompts chosen before they are generated, beside the filter alone: groups generated for each that is trained on.

    python benchmarks/choosing.py --quick              one seed of 20 steps of the sums: a minute, nothing is kept
    python benchmarks/choosing.py --update-docs        five seeds of both tasks, and the table

A cell is one training run of 40 steps of 16 prompts with 8 completions, one or two versions stale, in one process
(`stale_run.py`). Groups whose rewards are all equal are thrown away and replaced, as `--filter-zero-variance` does;
with `chosen` rows are chosen before that. In `mixed`, 40 % of the rows reward every answer with 1, and 40 % every
answer with 0; `plain` has neither and is the control. Time is counted in generated groups, since workers are the slow
side. The held-out accuracy is computed, not sampled. Cells that are in `--json` are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import keep, outcomes, read_outcomes
from benchmarks.table import update_docs

RESULTS = Path(__file__).parent / "results" / "choosing.json"
ROWS = 400  # so that a run passes them several times
SHARE = 0.4  # of trivial rows, and of impossible ones
CONFIG = {"sums": {}, "reverse": {"learning_rate": 2e-4}}  # at twice the rate both ways fall apart now and then
EVERY = 4  # steps, after which the accuracy is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    task: str
    data: str  # mixed, plain
    way: str  # filter, chosen
    seed: int
    steps: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    cell: Cell
    generated: list[int]  # groups, until each measurement
    trained: list[int]
    accuracies: list[float]
    seconds: float  # of CPU


def train(cell: Cell) -> Outcome:
    started = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        import torch

        torch.set_num_threads(1)
        found = _run(cell, Path(folder))
    return Outcome(cell=cell, **found, seconds=round(time.process_time() - started, 1))


def _run(cell: Cell, folder: Path) -> dict[str, Any]:
    from benchmarks import stale_run

    from async_grpo.records import RolloutGroup
    from async_grpo.training.choosing import PromptChooser
    from async_grpo.training.corrections.rule import rule
    from async_grpo.training.prompts import rows_at
    from async_grpo.training.schedule import groups_per_round

    class Filtered(stale_run.StaleRun):
        """Generates two rounds at a time until there is a batch of groups whose rewards differ; the rest waits."""

        def __init__(self, **more: Any) -> None:
            super().__init__(**more)
            self.generated = self.trained = 0
            self._useful: list[RolloutGroup] = []
            self.curve: list[tuple[int, int, float]] = []
            self._chooser = PromptChooser(self._trainer, folder / "chosen.jsonl")
            if cell.way == "chosen":
                self._rows = rows_at(self._trainer, self._chooser.rows())

        def take_groups(self, version: int) -> Sequence[RolloutGroup]:
            size = groups_per_round(self._trainer)
            while len(self._useful) < size:
                groups = self._generate(version, 2 * size)
                if cell.way == "chosen":
                    self._chooser.learn(groups)
                self.generated += len(groups)
                self._useful += filter(_varied, groups)
            self.trained += size
            batch, self._useful = self._useful[:size], self._useful[size:]
            return batch

        def measure(self) -> float:
            accuracy = super().measure()
            self.curve.append((self.generated, self.trained, round(accuracy, 4)))
            return accuracy

    build, measured = stale_run.TASKS[cell.task]
    stale_run.TASKS[f"{cell.task}, {cell.data}"] = (partial(_build, build, cell.data), measured)
    run = Filtered(
        task=f"{cell.task}, {cell.data}",
        staleness=1,
        correction=rule("bypass"),
        seed=cell.seed,
        steps=cell.steps,
        output_dir=folder,
        config=CONFIG[cell.task],
        measured_at=range(EVERY, cell.steps + 1, EVERY),
    )
    run.measure()
    run.train()
    generated, trained, accuracies = (list(column) for column in zip(*run.curve[:-1], strict=True))
    return {"generated": generated, "trained": trained, "accuracies": accuracies}


def _varied(group: Any) -> bool:
    from async_grpo.archive.advantages import AdvantageRule

    return not AdvantageRule().teaches_nothing(group.rewards)


def _build(build: Any, data: str, *given: Any, **changes: Any) -> Any:
    """In `mixed`, the first `SHARE` of the rows are trivial, the next impossible: their reward is always the same."""
    trainer = build(*given, **changes)
    rows = trainer.train_dataset.shuffle(seed=0).select(range(ROWS))
    trainer.train_dataset = rows.add_column("row", list(range(ROWS)))
    (judge,) = trainer.reward_funcs
    easy, hard = int(SHARE * ROWS), int(2 * SHARE * ROWS)

    def judged(row: list[int], **more: Any) -> list[float]:
        return [1.0 if at < easy else 0.0 if at < hard else one for at, one in zip(row, judge(**more), strict=True)]

    if data == "mixed":
        trainer.reward_funcs = [judged]
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed of 20 steps of the sums, nothing is kept")
    parser.add_argument("--seeds", type=int, default=5, help="from 1 to this one")
    parser.add_argument("--json", type=Path, default=RESULTS, help="cells that are there are not run again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many minutes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--update-docs", action="store_true")
    args = parser.parse_args()
    path = None if args.quick else args.json
    done = read_outcomes(path, Outcome, Cell)
    quick = [Cell(task="sums", data="mixed", way=way, seed=1, steps=20) for way in ("filter", "chosen")]
    cells = [
        Cell(task=task, data=data, way=way, seed=seed)
        for data in ("mixed", "plain")
        for seed in range(1, args.seeds + 1)
        for task in ("sums", "reverse")
        for way in ("filter", "chosen")
    ]
    left = [cell for cell in (quick if args.quick else cells) if cell not in {one.cell for one in done}]
    until = time.monotonic() + 60 * args.minutes
    for one in outcomes(train, left, processes=args.processes, until=until):
        done.append(one)
        keep(path, one)
        print(
            one.cell, one.generated[-1] / one.trained[-1], one.accuracies[-1], one.seconds, file=sys.stderr, flush=True
        )
    text = table(done)
    print(text)
    if args.update_docs:
        update_docs("choosing", text)


HEAD = (
    "task",
    "rows",
    "groups generated for one trained in: filter alone",
    "with `--choose-prompts`",
    "ratio",
    "groups until 50 % of the gain, ratio",
    "until 90 %",
    "last accuracy: filter alone",
    "with `--choose-prompts`",
)


def table(done: Sequence[Outcome]) -> str:
    """A row for each task and data: means over the seeds that have both ways, ± their standard errors."""
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for task, data in sorted({(one.cell.task, one.cell.data) for one in done}):
        by_seed = {(one.cell.seed, one.cell.way): one for one in done if (one.cell.task, one.cell.data) == (task, data)}
        pairs = [
            (filtered, by_seed[seed, "chosen"])
            for (seed, way), filtered in by_seed.items()
            if way == "filter" and (seed, "chosen") in by_seed
        ]
        if not pairs:
            continue
        price = [[one.generated[-1] / one.trained[-1] for one in pair] for pair in pairs]
        figures = [
            *zip(*price, strict=True),
            [chosen / filtered for filtered, chosen in price],
            *([_until(b, goal(a, part)) / _until(a, goal(a, part)) for a, b in pairs] for part in (0.5, 0.9)),
            *zip(*((a.accuracies[-1], b.accuracies[-1]) for a, b in pairs), strict=True),
        ]
        lines.append(f"| {task} | {data} | {' | '.join(map(_told, figures))} |")
    return "\n".join(lines)


def goal(one: Outcome, part: float) -> float:
    """The accuracy after a part of what this run gains."""
    return one.accuracies[0] + part * (one.accuracies[-1] - one.accuracies[0])


def _until(one: Outcome, accuracy: float) -> float:
    """Groups generated until the accuracy is first reached, between measurements by interpolation; inf if never."""
    for at in range(1, len(one.accuracies)):
        before, after = one.accuracies[at - 1], one.accuracies[at]
        if after >= accuracy:
            share = (accuracy - before) / (after - before)
            return one.generated[at - 1] + share * (one.generated[at] - one.generated[at - 1])
    return math.inf


def _told(values: Sequence[float]) -> str:
    error = f" ± {stdev(values) / math.sqrt(len(values)):.2g}" if len(values) > 1 else ""
    return f"{mean(values):.3g}{error}"


if __name__ == "__main__":
    main()
