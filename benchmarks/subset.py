"""What training on m of n completions saves a trainer: its CPU time and tokens to 50 and 90 % of the gain.

    python benchmarks/subset.py --quick                   one seed of one task, 12 steps: within a minute
    python benchmarks/subset.py --seeds 5 --update-docs   all cells; those that are in --json are not run again

A cell is one training run at staleness 1 (`stale_run.py`) on 16 prompts a step, in one process with one thread. `all`
trains on all 32 completions of a prompt, `subset` on 8 of the 32 (`--train-of-group 8`), `small` has only 8. Workers
cost nothing here, as where they are many: the clock is the CPU time of the trainer alone, from having its groups to the
end of the step. After each step the probability of the right answer to problems that training never sees is computed.
The gain is that of `all` with the same seed, in the mean over its last five steps, over the model before training.
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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import outcomes
from benchmarks.edge_report import TITLES, write
from benchmarks.table import describe_machine, machine_line, update_docs

RESULTS = Path(__file__).parent / "results" / "subset.json"
PROMPTS, STEPS, STALENESS = 16, 36, 1
SHARES = (0.5, 0.9)  # of the gain
COLUMNS = {"all": (32, None), "subset": (32, 8), "small": (8, None)}  # completions of a prompt, and those trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    task: str
    column: str
    rate: float
    seed: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    cell: Cell
    accuracies: list[float]  # before training, and after each step
    seconds: list[float]  # of the trainer's CPU time until then
    tokens: list[int]  # that it has computed until then

    def cost_to(self, accuracy: float, costs: Sequence[float]) -> float:
        """The cost at which the accuracy was first reached, between two steps in proportion; infinite if never."""
        curve = list(zip(self.accuracies, costs, strict=True))
        for (before, spent), (after, cost) in pairwise(curve):
            if after >= accuracy:
                return spent + (cost - spent) * max(0.0, accuracy - before) / (after - before)
        return math.inf


def train(cell: Cell) -> Outcome:
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        import torch
        from benchmarks.stale_run import StaleRun

        from async_grpo.setup.process import keep_freed_memory
        from async_grpo.training.corrections.rule import rule

        torch.set_num_threads(1)
        keep_freed_memory(os.environ)
        generated, trained = COLUMNS[cell.column]
        found = Outcome(cell=cell, accuracies=[], seconds=[], tokens=[])

        class Timed(StaleRun):
            spent = began = 0.0

            def training_begins(self) -> None:
                super().training_begins()
                self.point()

            def take_groups(self, version: int) -> Any:
                self.spent += time.process_time() - self.began
                groups = super().take_groups(version)
                self.began = time.process_time()
                return groups

            def step_done(self) -> bool:
                self.spent += time.process_time() - self.began
                super().step_done()
                self.point()
                return True

            def point(self) -> None:
                found.accuracies.append(round(self.measure(), 4))
                found.seconds.append(round(self.spent, 3))
                found.tokens.append(self.trainer.tokens_computed)
                self.began = time.process_time()

        config = {"num_generations": generated, "per_device_train_batch_size": PROMPTS * generated}
        run = Timed(
            task=cell.task,
            staleness=STALENESS,
            correction=rule("bypass", None, most=None),
            seed=cell.seed,
            steps=cell.steps,
            output_dir=Path(folder),
            config={**config, "learning_rate": cell.rate, "lr_scheduler_type": "constant", "warmup_steps": 0},
        )
        run.trainer.train_of_group = trained
        run.train()
    return found


def table(done: Sequence[Outcome]) -> str:
    head = ["task, rate", "trained", "accuracy at the end", *(f"CPU time to {share:.0%}" for share in SHARES)]
    head += [f"tokens to {share:.0%}" for share in SHARES] + ["steps to 90%", "CPU time a step"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for task, rate in dict.fromkeys((one.cell.task, one.cell.rate) for one in done):
        for column, (generated, trained) in COLUMNS.items():
            here = [one for one in done if (one.cell.task, one.cell.rate) == (task, rate)]
            of_all = {one.cell.seed: one for one in here if one.cell.column == "all"}
            ones = [one for one in here if one.cell.column == column and one.cell.seed in of_all]
            if pairs := [(of_all[one.cell.seed], one) for one in ones]:
                of = f"{trained or generated} of {generated}"
                lines.append(f"| {TITLES[task]}, {rate:g} | {of} | {' | '.join(_figures(pairs))} |")
    return "\n".join(lines)


def _figures(pairs: Sequence[tuple[Any, Outcome]]) -> list[str]:
    """Means of ratios to the run on all completions with the same seed."""
    ratios: dict[str, list[float]] = {}
    for whole, one in pairs:
        for kind in ("seconds", "tokens", "steps"):
            for share in SHARES if kind != "steps" else SHARES[-1:]:
                of_one, of_whole = (_cost(each, whole, share, kind) for each in (one, whole))
                ratios.setdefault(f"{kind}{share}", []).append(of_one / of_whole)
        ratios.setdefault("each", []).append(one.seconds[-1] / whole.seconds[-1])
    return [_figure([_last(one) for _, one in pairs], digits=3), *map(_figure, ratios.values())]


def _cost(one: Outcome, whole: Outcome, share: float, kind: str) -> float:
    costs = range(len(one.tokens)) if kind == "steps" else getattr(one, kind)
    before = whole.accuracies[0]
    return one.cost_to(before + share * (_last(whole) - before), costs)


def _last(one: Outcome) -> float:
    return mean(one.accuracies[-5:])


def _figure(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± standard error, and how many never came there."""
    there = [value for value in values if value < math.inf]
    if len(there) < len(values):
        return f"not reached by {len(values) - len(there)} of {len(values)}"
    error = f" ± {stdev(there) / math.sqrt(len(there)):.{digits}f}" if len(there) > 1 and stdev(there) else ""
    return f"{mean(there):.{digits}f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of one task, 12 steps; nothing is kept")
    parser.add_argument("--seeds", type=int, default=5, help="from 1 to this one")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-4, 4e-4])
    parser.add_argument("--json", type=Path, default=RESULTS, help="cells that are there are not run again")
    parser.add_argument("--update-docs", action="store_true", help="put the table into the documentation")
    args = parser.parse_args()
    of_all = [(task, rate, seed) for seed in range(1, args.seeds + 1) for task in TITLES for rate in args.rates]
    asked, steps = ([("sums", 4e-4, 1)], 12) if args.quick else (of_all, STEPS)
    cells = [Cell(task=t, column=c, rate=rate, seed=seed, steps=steps) for t, rate, seed in asked for c in COLUMNS]
    done = [] if args.quick else read(args.json)
    left = [cell for cell in cells if cell not in {one.cell for one in done}]
    for one in outcomes(train, left, processes=1, until=math.inf):
        done.append(one)
        write(None if args.quick else args.json, done)
        print(f"{one.cell}: {_last(one):.3f}, {one.seconds[-1]} s, {one.tokens[-1]:,} tokens", file=sys.stderr)
    seeds = len({one.cell.seed for one in done})
    shape = f"{done[0].cell.steps} steps of {PROMPTS} prompts, staleness {STALENESS}, seeds 1 to {seeds}"
    told = f"{machine_line(describe_machine())}; {shape}; ratios to the run on all 32, mean ± standard error."
    print(f"{told}\n\n{table(done)}")
    if args.update_docs:
        update_docs("subset", f"{told}\n\n{table(done)}")


def read(path: Path) -> list[Outcome]:
    found = json.loads(path.read_text())["cells"] if path.exists() else []
    return [Outcome(**{**one, "cell": Cell(**one["cell"])}) for one in found]


if __name__ == "__main__":
    main()
