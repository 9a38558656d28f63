"""Prompts chosen before they are generated, beside the filter alone: groups generated for each that is trained on.

    python benchmarks/choosing.py --quick              one seed of 20 steps of the sums: a minute, nothing is kept
    python benchmarks/choosing.py --update-docs        five seeds of both tasks, and the table

A cell is one training run of 40 steps of 16 prompts with 8 completions, one or two versions stale, in one process
(`stale_run.py`). Groups whose rewards are all equal are thrown away and replaced, as `--filter-zero-variance` does;
with `chosen` rows are chosen before that. In `mixed`, 40 % of the rows reward every answer with 1, and 40 % every
answer with 0; `plain` has neither and is the control. Time is counted in generated groups. The held-out accuracy is
computed, not sampled. Cells that are in the JSON file are not run again.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import update_docs

RESULTS = Path(__file__).parent / "results" / "choosing.json"
ROWS = 400  # so that a run passes them several times
SHARE = 0.4  # of trivial rows, and of impossible ones
CONFIG = {"sums": {}, "reverse": {"learning_rate": 2e-4}}  # at twice the rate both ways fall apart now and then
PROMPTS = 16  # a step
EVERY = 4  # steps, after which the accuracy is measured
WAYS = ("filter", "chosen")
HEAD = (
    "| task | rows | generated for one trained on: filter alone | chosen | ratio | until 50 % of the gain, ratio | "
    "until 90 % | last accuracy: filter alone | chosen |"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    task: str
    data: str  # mixed, plain
    way: str
    seed: int
    steps: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    cell: Cell
    generated: list[int]  # groups, until each measurement
    accuracies: list[float]

    @property
    def price(self) -> float:
        """Groups generated for each that is trained on."""
        return self.generated[-1] / (PROMPTS * self.cell.steps)

    def until(self, accuracy: float) -> float:
        """Groups generated until the accuracy is first reached, interpolated between measurements; inf if never."""
        for at in range(1, len(self.accuracies)):
            before, after = self.accuracies[at - 1], self.accuracies[at]
            if after >= accuracy:
                share = (accuracy - before) / (after - before)
                return self.generated[at - 1] + share * (self.generated[at] - self.generated[at - 1])
        return math.inf


def train(cell: Cell) -> Outcome:
    import torch
    from benchmarks import stale_run

    from async_grpo.archive.advantages import AdvantageRule
    from async_grpo.records import RolloutGroup
    from async_grpo.training.choosing import PromptChooser
    from async_grpo.training.corrections.rule import rule
    from async_grpo.training.prompts import prompt_rows

    torch.set_num_threads(1)
    generated, accuracies = list[int](), list[float]()

    class Filtered(stale_run.StaleRun):
        """Generates two rounds at a time until there is a batch of groups whose rewards differ; the rest waits."""

        def __init__(self, folder: Path, **more: Any) -> None:
            super().__init__(output_dir=folder, **more)
            self._generated, self._useful = 0, list[RolloutGroup]()
            self._chooser = PromptChooser(self.trainer, folder / "chosen.jsonl")
            if cell.way == "chosen":
                self._rows = prompt_rows(self.trainer, chosen=self._chooser.rows())

        def take_groups(self, version: int) -> Sequence[RolloutGroup]:
            while len(self._useful) < PROMPTS:
                groups = self._generate(version, 2 * PROMPTS)
                if cell.way == "chosen":
                    self._chooser.learn(groups)
                self._generated += len(groups)
                self._useful += (group for group in groups if not AdvantageRule().teaches_nothing(group.rewards))
            batch, self._useful = self._useful[:PROMPTS], self._useful[PROMPTS:]
            return batch

        def measure(self) -> float:
            generated.append(self._generated)
            accuracies.append(round(super().measure(), 4))
            return accuracies[-1]

    task, (build, measured) = f"{cell.task}, {cell.data}", stale_run.TASKS[cell.task]
    stale_run.TASKS[task] = (partial(_build, build, cell.data), measured)
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        run = Filtered(
            Path(folder),
            task=task,
            staleness=1,
            correction=rule("bypass"),
            seed=cell.seed,
            steps=cell.steps,
            config=CONFIG[cell.task],
            measured_at=range(EVERY, cell.steps + 1, EVERY),
        )
        run.measure()
        run.train()
    return Outcome(cell=cell, generated=generated[:-1], accuracies=accuracies[:-1])  # the last step is there twice


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


def run() -> list[Outcome]:
    """Run the cells that are not in `RESULTS`, and keep them there; all that are there."""
    told = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = [Outcome(**{**one, "cell": Cell(**one["cell"])}) for one in told]
    for data, seed, task, way in product(("mixed", "plain"), range(1, 6), CONFIG, WAYS):
        if (cell := Cell(task=task, data=data, way=way, seed=seed)) not in [one.cell for one in done]:
            done.append(train(cell))
            RESULTS.write_text("[\n" + ",\n".join(json.dumps(asdict(one)) for one in done) + "\n]\n")
            print(cell, f"{done[-1].price:.2f} groups, {done[-1].accuracies[-1]:.3f}", file=sys.stderr, flush=True)
    return done


def table(done: Sequence[Outcome]) -> str:
    """A row for each task and data: means over the seeds that have both ways, ± their standard errors."""
    lines = [HEAD, "|" + "---|" * 9]
    for data, task in sorted({(one.cell.data, one.cell.task) for one in done}):
        of = {(one.cell.seed, one.cell.way): one for one in done if (one.cell.data, one.cell.task) == (data, task)}
        pairs = [(of[seed, "filter"], of[seed, "chosen"]) for seed, way in of if way == "chosen"]
        first, last = pairs[0][0].accuracies[0], [filtered.accuracies[-1] for filtered, _ in pairs]
        goals = [[first + part * (end - first) for end in last] for part in (0.5, 0.9)]
        figures = [
            *zip(*((a.price, b.price) for a, b in pairs), strict=True),
            [b.price / a.price for a, b in pairs],
            *([b.until(goal) / a.until(goal) for (a, b), goal in zip(pairs, each, strict=True)] for each in goals),
            last,
            [chosen.accuracies[-1] for _, chosen in pairs],
        ]
        lines.append(f"| {task} | {data} | {' | '.join(map(_told, figures))} |")
    return "\n".join(lines)


def _told(values: Sequence[float]) -> str:
    return f"{mean(values):.3g}" + (f" ± {stdev(values) / math.sqrt(len(values)):.2g}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed of 20 steps of the sums, nothing is kept")
    parser.add_argument("--update-docs", action="store_true", help="put the table into the documentation")
    args = parser.parse_args()
    quick = (Cell(task="sums", data="mixed", way=way, seed=1, steps=20) for way in WAYS)
    text = table([train(cell) for cell in quick] if args.quick else run())
    print(text)
    if args.update_docs:
        update_docs("choosing", text)


if __name__ == "__main__":
    main()
