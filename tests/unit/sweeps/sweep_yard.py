"""Sweeps whose runs are a few lines long, in place of servers and workers that load a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.sweeps import report, sweep
from async_grpo_experiments.sweeps.plan import Sweep
from async_grpo_experiments.sweeps.preflight import Preflight

BLANK = b"\x89PNG\r\n\x1a\n" + bytes(17)

# In the place of `python -m async_grpo.cli`: writes the files of a run. `behave.json` says what each seed does.
FAKE_TRAIN = """
import json, os, signal, sys, time
from pathlib import Path

arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
seed, run = value("--seed"), Path(value("--run-dir"))
behaviour = json.loads(Path("behave.json").read_text()).get(seed, "finish")
run.mkdir(parents=True, exist_ok=True)
with Path("starts").open("a") as file:
    file.write(json.dumps([seed, os.getpid(), arguments, dict(os.environ)]) + "\\n")

def state(text, step):
    new = run / "run.json.new"
    known = {"run_id": "r" + seed, "plan": {"config": "c"}, "started": "s", "format": 4}
    new.write_text(json.dumps({**known, "state": text, "step": step}))
    new.replace(run / "run.json")

def evaluation(step, success):
    figure = {"value": success, "low": None, "high": None, "problems": 4}
    values = {str(p): [min(1.0, success + 0.1 * p - 0.15), success] for p in range(4)}
    line = {"run_id": "r" + seed, "step": step, "seconds": 1.0, "replicates": 5, "sampling": {"temperature": 0.6},
            "figures": {"success_rate": figure}, "tasks": {}, "failed": {}, "by_problem": values, "first_seq": 0,
            "knows_success": True}
    with (run / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")

def step(number, reward):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "monotonic_s": time.monotonic(), "loss": 0.1, "reward": reward}) + "\\n")

state("running", 0)
if behaviour == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("began", flush=True)
if behaviour in ("hang", "deaf"):
    while True:
        time.sleep(0.02)
step(1, 0.2)
evaluation(0, 0.4 + 0.01 * (int(seed) % 7))
if behaviour == "raise":
    print("Traceback (most recent call last):\\n  File x\\nRuntimeError: reward of step 3", file=sys.stderr)
    state("failed", 3)
    sys.exit(1)
if behaviour == "full":
    sys.exit("error: The disk is full: no room for checkpoint-3.")
if behaviour == "half":
    state("stopped", 2)
    sys.exit(0)
step(2, 0.5)
evaluation(5, 0.8 + 0.01 * (int(seed) % 5))
state("finished", 5)
"""


class SweepYard:
    """A current folder in which sweeps run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.setup = folder / "my_trainer.py"
        self.setup.write_text("def get_trainer(): ...\n")
        (folder / "fake_train.py").write_text(FAKE_TRAIN)
        self.behave()

    def behave(self, **seeds: str) -> None:
        """`s2="raise"`: what seed 2 does."""
        named = {name.removeprefix("s"): what for name, what in seeds.items()}
        (self.folder / "behave.json").write_text(json.dumps(named))

    def sweep(self, *seeds: int, **more: Any) -> Sweep:
        return Sweep(setup=str(self.setup), seeds=seeds, name="mine", **{"stagger_s": 0.0, **more})

    def run(self, wanted: Sweep, *, resume: bool = False) -> int:
        return sweep.run_sweep(wanted, resume=resume)

    def starts(self) -> list[tuple[str, int, list[str], dict[str, str]]]:
        """Seed, pid, arguments and environment of each start so far."""
        file = self.folder / "starts"
        return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def play(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From here on, sweeps of this process start the fake, in this folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sweep, "PROGRAM", (sys.executable, "-S", str(folder / "fake_train.py")))
    found = Preflight(places=[Place(name="a"), Place(name="b")], offline=False, serves=False)
    monkeypatch.setattr(sweep, "preflight", lambda *_: found)  # nothing is built
    monkeypatch.setattr(report, "band_plot", lambda agreement: BLANK)  # drawing takes a second
