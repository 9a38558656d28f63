"""Runs one side of a comparison, plain TRL or a server with workers, by the same command as a user would."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.setups.sums import WARM_UP_STEPS, Setting
from benchmarks.table import ROOT

SETUP = Path(__file__).parent / "setups" / "sums.py"
CORES = len(os.sched_getaffinity(0))
DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How a setting is trained: in one process with plain TRL, or by a server with workers."""

    name: str
    workers: int = 0  # 0: plain TRL
    threads: int | None = None  # of each process; None: as the launcher decides, all cores for plain TRL
    server_threads: int | None = None  # of the training process, where it differs
    passive: bool = False  # threads that wait sleep instead of spinning: OMP_WAIT_POLICY=PASSIVE
    flags: tuple[str, ...] = ()
    unpadded: bool = False  # plain TRL with `Unpadded` before its trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run left: seconds are on the machine's monotonic clock."""

    step_ends: list[float]
    cpu_s: dict[str, list[float]]  # role -> CPU seconds that its processes used until each step's end
    accuracy: dict[int, float] = field(default_factory=dict)  # by step
    logs: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl of the timed steps
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds a step, over all that are timed."""
        return _slope(self.step_ends)

    @property
    def step_cpu_s(self) -> float:
        """CPU seconds a step, of all processes together: what decides when every core is full."""
        return sum(self.cpu_by_role.values())

    @property
    def cpu_by_role(self) -> dict[str, float]:
        """CPU seconds a step. Plain TRL is one process of the role `train`, which is the launcher beside others."""
        return {role: _slope(used) for role, used in self.cpu_s.items()}

    def mean(self, metric: str) -> float:
        return statistics.mean(entry[metric] for entry in self.logs if metric in entry)

    @property
    def final_accuracy(self) -> float:
        return self.accuracy[max(self.accuracy)]

    def seconds_to(self, accuracy: float) -> float | None:
        """From the start of the first step until the held-out accuracy is reached, between two snapshots linearly.

        The first step counts as a mean one: before it, processes load.
        """
        begin = self.step_ends[0] - self.step_s
        earlier: tuple[float, float] | None = None
        for step, value in sorted(self.accuracy.items()):
            when = self.step_ends[step - 1] - begin
            if value >= accuracy:
                if earlier is None:
                    return when
                share = (accuracy - earlier[1]) / (value - earlier[1])
                return earlier[0] + share * (when - earlier[0])
            earlier = (when, value)
        return None


def mean_of(runs: Sequence[Run]) -> Run:
    """The times and accuracies of runs of the same length, averaged step by step."""
    return Run(
        step_ends=[statistics.mean(ends) for ends in zip(*(run.step_ends for run in runs), strict=True)],
        cpu_s={},
        accuracy={step: statistics.mean(run.accuracy[step] for run in runs) for step in runs[0].accuracy},
    )


def _slope(ends: list[float]) -> float:
    return (ends[-1] - ends[WARM_UP_STEPS - 1]) / (len(ends) - WARM_UP_STEPS)


def run_side(side: Side, setting: Setting, folder: Path) -> Run:
    """Train to the end; raises with the log's last lines when the command fails."""
    folder.mkdir(parents=True)
    record, run_dir = folder / "record.json", folder / "run"
    where = ["--device", "cpu"]
    if side.workers:
        where = ["--master-device-id", "cpu", "--num-workers", str(side.workers), "--run-dir", str(run_dir)]
    setting = replace(setting, server_threads=side.server_threads, unpadded=side.unpadded)
    env = {**os.environ, **setting.as_env(), "BENCH_RECORD": str(record), "PYTHONPATH": str(ROOT / "src")}
    env.pop("OMP_NUM_THREADS", None)
    env.pop("OMP_WAIT_POLICY", None)
    threads = side.threads if side.workers else side.threads or CORES
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    if side.passive:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    log = folder / "log.txt"
    with log.open("wb") as output:
        result = subprocess.run(
            [sys.executable, "-m", "async_grpo.cli", "train", str(SETUP), *where, *side.flags],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=DEADLINE_S,
        )
    if result.returncode != 0 or not record.exists():
        last_words = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{side.name} ended with exit code {result.returncode}:\n{last_words}")
    told = json.loads(record.read_text())
    told["accuracy"] = {int(step): value for step, value in told["accuracy"].items()}
    return Run(**told, logs=_timed_logs(run_dir), summary=_read(run_dir / "summary.json"))


def _timed_logs(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if "loss" in entry and entry["step"] > WARM_UP_STEPS]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
