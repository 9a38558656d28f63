"""What an evaluation costs: its time beside training and alone, what training loses by it, and rewards a second.

    python benchmarks/evaluation.py [--quick] [--json FILE]

The demo's recipe trains on two workers of this machine, in rounds: without evaluation, with five evaluations by the
workers (300 problems, 5 answers each), and with five of TRL's own, for which training waits (the same problems, as many
answers). "Alone" is `async-grpo evaluate` of the last checkpoint with as many workers: nothing else runs then. All
times are from the first to the last logged step; loading does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.control import PAIRS, control_s
from benchmarks.table import Row, as_text, row, write_json

from async_grpo.rewards import mbpp
from async_grpo.rewards.mathematics import equal
from async_grpo.rewards.sandbox import SWITCH

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "src" / "app" / "trainer_setup_tiny.py"
EVERY, REPLICATES = 25, 5
BLOCKING = f"""
import sys
sys.path.insert(0, {str(RECIPE.parent)!r})
from trainer_setup_tiny import get_trainer as trainer_of_the_recipe
from transformers.trainer_utils import IntervalStrategy

def get_trainer():
    trainer = trainer_of_the_recipe()
    trainer.args.eval_strategy = IntervalStrategy.STEPS
    trainer.args.eval_steps, trainer.args.eval_on_start = {EVERY}, True
    trainer.num_generations_eval = trainer.args.num_generations_eval = {REPLICATES}
    trainer.args.per_device_eval_batch_size = 300 * {REPLICATES}
    return trainer
"""
PROGRAM = "sum<end_working_out><SOLUTION>def add(a, b):\n    return a + b</SOLUTION>"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 1) == 1", "assert add(-1, 1) == 0"]
FORMULAS = [("\\frac{1}{2}", "0.5"), ("x^2+2x+1", "(x+1)^2"), ("18", "18.0"), ("\\sqrt{8}", "2\\sqrt{2}")]


class Run(NamedTuple):
    """What one run took."""

    train_s: float
    evaluation_s: list[float]  # each


def train(folder: Path, setup: Path, steps: int, *options: str) -> Run:
    arguments = ["train", str(setup), "--distributed", "-n", "2", "--steps", str(steps), *options]
    command(folder, *arguments)
    metrics = [json.loads(line) for line in (folder / "worker" / "metrics.jsonl").read_text().splitlines()]
    times = [entry["monotonic_s"] for entry in metrics if "loss" in entry]
    return Run(max(entry["monotonic_s"] for entry in metrics) - times[0], seconds(folder / "worker"))


def seconds(run_dir: Path) -> list[float]:
    path = run_dir / "evaluations.jsonl"
    return [json.loads(line)["seconds"] for line in path.read_text().splitlines()] if path.exists() else []


def command(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run: Any = subprocess.run(
        [sys.executable, "-m", "async_grpo.cli", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        sys.exit(run.stdout + run.stderr)


def alone(folder: Path, steps: int) -> float:
    checkpoint = f"outputs/tiny/checkpoint-{steps}"
    command(folder, "evaluate", checkpoint, "--config", str(RECIPE), "-n", "2", "--overwrite")
    return seconds(folder / "evaluation")[0]


def runs(rounds: int, steps: int) -> list[Row]:
    without, ours, blocking, relative, controls = [], [], [], [], [control_s()]
    by_workers = ("--eval-every", str(EVERY), "--eval-replicates", str(REPLICATES))
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as outputs:
            folders = [Path(outputs) / name for name in ("without", "ours", "blocking")]
            for folder in folders:
                folder.mkdir()
            setup = folders[2] / "blocking.py"
            setup.write_text(BLOCKING)
            without.append(train(folders[0], RECIPE, steps, "--eval-every", "0").train_s)
            controls.append(control_s())
            run = train(folders[1], RECIPE, steps, *by_workers)
            ours.append(run.train_s)
            relative.append(max(run.evaluation_s) / alone(folders[1], steps))
            controls.append(control_s())
            blocking.append(train(folders[2], setup, steps, "--eval-every", "0").train_s)
            controls.append(control_s())
    count, steady = steps // EVERY + 1, partial(row, controls=controls)
    lost = [(mine - none) / count for mine, none in zip(ours, without, strict=True)]
    lost_to_trl = [(theirs - none) / count for theirs, none in zip(blocking, without, strict=True)]
    return [
        steady("slowest evaluation in the run, by its time alone on the same workers", relative, "×", target="<= 1.15"),
        steady(f"training of {steps} steps without evaluation", without, "s"),
        steady(f"training lost to each of {count} evaluations by the workers", lost, "s"),
        steady(f"training lost to each of {count} of TRL's own evaluations", lost_to_trl, "s"),
    ]


def rewards(rounds: int) -> list[Row]:
    programs, checks = [], []
    equal([text for text, _ in FORMULAS], gold=[gold for _, gold in FORMULAS])  # loads math-verify
    for _ in range(rounds):
        cpu = children_s()
        mbpp([PROGRAM] * 10, test_list=[TESTS] * 10)
        programs.append(10 / (children_s() - cpu))
        started = time.monotonic()
        texts = [text for text, _ in FORMULAS] * 25
        assert all(equal(texts, gold=[gold for _, gold in FORMULAS] * 25))
        checks.append(len(texts) / (time.monotonic() - started))
    return [
        row("programs of three tests in the sandbox, a second of CPU time", programs, "1/s", target=">= 10"),
        row("comparisons by math-verify, processes warm", checks, "1/s"),
    ]


def children_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="rewards only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ[SWITCH] = "1"
    load = os.getloadavg()
    measured = rewards(5) + ([] if options.quick else runs(PAIRS, steps=100))
    print(as_text(measured))
    if options.json:
        write_json(options.json, measured, load_before=load)


if __name__ == "__main__":
    main()
