"""Accuracy over the learning rate, on rollouts that are exactly K versions old: up to where training falls apart.

    python benchmarks/edge.py --quick                         three seeds of the most telling columns: about a minute
    python benchmarks/edge.py --columns bypass/tis --staleness 2 --rates 4e-4 --seeds 8    adds these cells
    python benchmarks/edge.py --no-runs --plot PNG --update-docs                           tables of what is there

A cell is one training run of 60 steps of 16 prompts with 8 completions, at a constant rate and with one thread
(`stale_run.py`). Its figure is the probability of the right answer to problems that training never sees, in the mean
over them and over the weights after steps 40, 50 and 60; it is computed, not sampled. `plain` is TRL's GRPOTrainer in
one process. Each cell is written to `--json` when it is done, and those that are there are not run again.
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
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import outcomes
from benchmarks.edge_report import Cell, Outcome, draw, read, tables, write
from benchmarks.table import update_docs

from async_grpo.training.corrections.rule import Rule, rule

STEPS = 60
MEASURED_AT = (40, 50, 60)
RATES = (2e-4, 3e-4, 4e-4, 6e-4)
RESULTS = Path(__file__).parent / "results" / "edge.json"
KEPT = {"ess": "async/ess_sequences", "ess_token": "async/effective_sample_size", "kl": "async/kl_to_sampler"}
UNCLIPPED = {"epsilon": 1.0, "epsilon_high": 1e9}
CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 0}


@dataclass(frozen=True, slots=True)
class Column:
    """A loss: one of our corrections, with what the `GRPOConfig` says beside it, and a change of `edge_tries.TRIES`."""

    correction: str = "bypass"
    level: str | None = None
    most: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tries: str | None = None

    def rule(self) -> Rule:
        return rule(self.correction, self.level, most=self.most)


COLUMNS = {
    "plain": Column(),  # TRL alone
    "bypass": Column(),
    "decoupled": Column("decoupled"),
    "tis": Column("tis"),
    "icepop": Column("icepop"),
    "tis, sequence": Column("tis", "sequence", 8.0),
    # With one optimizer step a batch, w is the ratio pi / mu that `bypass` clips: so this is `decoupled` with a clip
    # around the sampler beside its weight, and `tis` with one but for tokens that should be rarer and have w > 2.
    "bypass, delta 5": Column(config={"delta": 5.0}),
    "bypass, delta 2": Column(config={"delta": 2.0}),
    "bypass, epsilon 0.02": Column(config={"epsilon": 0.02}),
    "GSPO": Column(config={"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
    "cispo": Column(config={"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo": Column(config={"loss_type": "sapo"}),
    "vespo": Column(config={"loss_type": "vespo"}),
    "off-policy mask": Column(config={"off_policy_mask_threshold": 0.1}),
    "optimal baseline": Column(tries="optimal baseline"),
    "unaligned": Column(tries="unaligned"),
    "second-moment mask": Column(config=UNCLIPPED, tries="second-moment mask"),
    "clip and second-moment mask": Column(tries="second-moment mask"),
    "bypass, beta1 0.5": Column(config={"adam_beta1": 0.5}),
}


# --- One cell ---------------------------------------------------------------------------------------------


def train(cell: Cell, measured_at: Sequence[int] = MEASURED_AT) -> Outcome:
    """Train a cell, and measure after these steps; 0: before the first."""
    started = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        import torch

        from async_grpo.setup.process import keep_freed_memory

        torch.set_num_threads(1)
        keep_freed_memory(os.environ)
        accuracies, series = (_plain if cell.column == "plain" else _stale)(cell, Path(folder), measured_at)
    return Outcome(
        cell=cell,
        accuracies=[round(accuracy, 4) for accuracy in accuracies],
        seconds=round(time.process_time() - started, 1),
        series={name: [float(f"{value:.3g}") for value in values] for name, values in series.items()},
    )


def _stale(cell: Cell, folder: Path, measured_at: Sequence[int]) -> tuple[list[float], dict[str, list[float]]]:
    from benchmarks.edge_tries import TRIES
    from benchmarks.stale_run import StaleRun

    column = COLUMNS[cell.column]
    run = StaleRun(
        task=cell.task,
        staleness=cell.staleness,
        correction=column.rule(),
        seed=cell.seed,
        steps=STEPS,
        output_dir=folder,
        config={**CONSTANT, "learning_rate": cell.rate, **column.config},
        measured_at=measured_at,
        kept_metrics=list(KEPT.values()),
    )
    if column.tries:
        TRIES[column.tries](run.trainer)
    run.train()
    return list(run.accuracies.values()), {short: run.series[name] for short, name in KEPT.items()}


def _plain(cell: Cell, folder: Path, measured_at: Sequence[int]) -> tuple[list[float], dict[str, list[float]]]:
    import torch
    from benchmarks.stale_run import TASKS
    from transformers import TrainerCallback

    from async_grpo.setup.trl_compat import repair_trl

    repair_trl()
    torch.manual_seed(cell.seed)
    build, accuracy = TASKS[cell.task]
    trainer = build(folder, cell.seed, STEPS, **CONSTANT, learning_rate=cell.rate)
    accuracies = []

    class Measure(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in measured_at:
                accuracies.append(accuracy(trainer.model, trainer.processing_class))

        on_step_end = on_train_begin

    trainer.add_callback(Measure())
    trainer.train()
    return accuracies, {}


# --- Which cells ------------------------------------------------------------------------------------------


def asked_for(args: Any) -> list[Cell]:
    """Seed by seed, so that an unfinished table has every combination."""
    return [
        Cell(task=task, column=column, staleness=staleness, rate=rate, seed=seed)
        for seed in args.seeds
        for task in args.tasks
        for rate in args.rates
        for column in args.columns
        for staleness in (args.staleness if column != "plain" else [0])
    ]


QUICK = [
    Cell(task="reverse", column=column, staleness=staleness, rate=4e-4, seed=seed)
    for seed in (1, 2, 3)
    for column, staleness in (("plain", 0), ("bypass", 1), ("bypass", 2))
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Lists have a / between their items.")
    parser.add_argument("--quick", action="store_true", help="three seeds of the most telling columns, nothing is kept")
    parser.add_argument("--no-runs", action="store_true", help="only tables and plot of the cells that are there")
    parser.add_argument("--tasks", type=_texts, default=["reverse"], help="reverse, sums")
    parser.add_argument("--columns", type=_texts, default=["plain", "bypass"], help=f"of {'/'.join(COLUMNS)}")
    parser.add_argument("--staleness", type=_numbers, default=[2])
    parser.add_argument("--rates", type=_numbers, default=list(RATES))
    parser.add_argument("--seeds", type=_seeds, default=_seeds("3"), help="8: from 1 to 8; 9-16: from 9 to 16")
    parser.add_argument("--json", type=Path, default=RESULTS, help="cells that are there are not run again")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many minutes")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--plot", type=Path, help="draw accuracy over the rate into this PNG file")
    parser.add_argument("--update-docs", action="store_true", help="put the tables into the documentation")
    args = parser.parse_args()
    done = run(args)
    text = tables(done)
    print(text)
    if args.plot:
        draw(done, args.plot)
    if args.update_docs:
        update_docs("edge", text)


def run(args: Any) -> list[Outcome]:
    """Run the cells that are missing; all that are there."""
    path = None if args.quick else args.json
    done = read(path)
    cells = QUICK if args.quick else [] if args.no_runs else asked_for(args)
    left = [cell for cell in cells if cell not in {outcome.cell for outcome in done}]
    until = time.monotonic() + 60 * args.minutes
    for number, outcome in enumerate(outcomes(train, left, processes=args.processes, until=until), start=1):
        done.append(outcome)
        write(path, done)
        told = f"{outcome.cell}: {mean(outcome.accuracies):.3f} ({outcome.seconds} s; {number} of {len(left)})"
        print(told, file=sys.stderr, flush=True)
    return done


def _texts(argument: str) -> list[str]:
    return argument.split("/")


def _seeds(argument: str) -> range:
    first, _, last = argument.rpartition("-")
    return range(int(first or 1), int(last) + 1)


def _numbers(argument: str) -> list[Any]:
    return [float(text) if "e" in text else int(text) for text in argument.split("/")]


if __name__ == "__main__":
    main()
