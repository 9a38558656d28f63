"""Sweeps of real training: killed and resumed, and with plain TRL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_grpo.roles.plain_trl import read_progress
from async_grpo.rundir.paths import RunDir
from async_grpo_experiments.slots.ledger import read
from kit.runs import SETUP, command, ran, steps_logged

pytestmark = [pytest.mark.slow, pytest.mark.integration]
ARGUMENTS = ("--seeds", "1,2", "--num-instances", "2", "--eval-every", "6", "--stagger", "0")


def test_a_killed_sweep_leaves_no_process_and_is_resumed_from_checkpoints(tmp_path: Path) -> None:
    env = {"TEST_EVAL": "4", "TEST_STEPS": "18", "TEST_REWARD_S": "0.2"}
    runs = [tmp_path / "outputs" / f"trl_random_model_instance{index}_seed{index + 1}" / "run" for index in range(2)]

    def trained() -> bool:
        logs = [run / "metrics.jsonl" for run in runs]
        return all(log.exists() and '"loss"' in log.read_text() for log in logs)

    with command("sweep", str(SETUP), *ARGUMENTS, cwd=tmp_path, **env) as sweep:
        sweep.wait_until(trained, "steps")
        assert len(sweep.children()) >= 8  # of each run a launcher, a server and two workers
        sweep.kill()
    assert "n = 2 of 2 seeds (1, 2)." in ran("sweep", "--resume", cwd=tmp_path, **env)
    for run in runs:
        state = RunDir(run).read_state()
        assert state is not None and (state.state, state.step) == ("finished", 18)
        assert state.plan.training.seed == int(run.parent.name[-1])
    report = json.loads((tmp_path / "outputs" / "sweep_random_model" / "report.json").read_text())
    n = {row["step"]: row["n"] for row in report["evaluations"]["reward_mean"]}
    assert (n[18], min(n[6], n[12])) in ((2, 1), (2, 2))  # the run that was ahead may have had one open at the kill


def test_plain_trl_runs_in_a_sweep_stops_with_a_checkpoint_and_continues(tmp_path: Path) -> None:
    env = {"TEST_EVAL": "4", "TEST_STEPS": "12", "TEST_REWARD_S": "1"}  # one run may load long after the other
    arguments = ("sweep", str(SETUP), "--mode", "trl", *ARGUMENTS)
    runs = [tmp_path / "outputs" / f"trl_random_model_instance{index}_seed{index + 1}" / "run" for index in range(2)]

    def step(run: Path) -> int:
        found = read_progress(run)
        return found.step if found is not None else 0

    with command(*arguments, cwd=tmp_path, **env) as sweep:
        sweep.wait_until(lambda: all(step(run) >= 2 for run in runs), "steps")
        sweep.process.terminate()
        assert sweep.wait() == 130, sweep.output
    stopped = [step(run) for run in runs]
    assert all(2 <= found <= 12 for found in stopped) and min(stopped) < 12, stopped
    assert all((run.parent / f"checkpoint-{found}").is_dir() for run, found in zip(runs, stopped, strict=True))
    shown = ran("sweep", "--resume", cwd=tmp_path, **env)
    records = read(tmp_path / "outputs" / "sweep_random_model" / "slots.jsonl")
    assert {record.state for record in records.values()} == {"finished"}
    assert "| 12 | 2 |" in shown
    assert sorted({*steps_logged(runs[0])}) == list(range(1, 13))  # none was skipped
