"""Evaluation in a run that is killed in the middle of one, and of the run's checkpoint afterwards."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kit.runs import SETUP, Command, audited, command, finish, read

pytestmark = pytest.mark.integration

STALENESS = ("--max-staleness", "2")  # training waits for each evaluation before the next is due: none is skipped
EVALUATED = ("--eval-every", "4", "--eval-replicates", "2", "--eval-k", "1,2")
RUN = ("--distributed", "--num-workers", "2", *STALENESS, *EVALUATED)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    path = folder / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def evaluating(folder: Path) -> list[int]:
    """The workers that have a job of an evaluation."""
    return [number for number in (1, 2) if any((folder / "queue").glob(f"9*_processing_by_dev{number}.safetensors"))]


def kill(run: Command, folder: Path) -> None:
    """End the launcher, and with it everything, in the middle of the first evaluation, after a worker died there."""
    number = run.wait_until(lambda: evaluating(folder), "an evaluation on a worker")[0]
    worker = run.worker(number)
    assert worker is not None
    worker.kill()
    run.wait_until(lambda: evaluating(folder), "the job of the dead worker on a live one")
    processes = run.children()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    for process in processes:
        process.wait(timeout=60)


def test_a_run_that_is_killed_during_an_evaluation_has_each_once_and_its_checkpoint_can_be_evaluated(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "marker"
    env = {"TEST_EVAL": "10", "TEST_STEPS": "8", "TEST_REWARD": "held", "TEST_MARKER": str(marker)}
    with command("train", str(SETUP), *RUN, cwd=tmp_path, **env) as run:
        kill(run, tmp_path / "worker")
    assert evaluations(tmp_path / "worker") == []
    marker.touch()
    said = finish(tmp_path, *RUN, "--resume", **env)
    found = evaluations(tmp_path / "worker")
    assert [one["step"] for one in found] == [0, 4, 8], said
    for one in found:
        assert one["figures"]["pass@2"]["problems"] == 10
        assert one["failed"] == {}
    assert "OK: all 32 groups accounted for (" in audited(tmp_path / "worker")
    metrics = [json.loads(line) for line in (tmp_path / "worker" / "metrics.jsonl").read_text().splitlines()]
    logged = {int(one["eval_version"]): one["eval_reward_mean"] for one in metrics if "eval_version" in one}
    assert logged == {one["step"]: one["figures"]["reward_mean"]["value"] for one in found}

    checkpoint = ("checkpoints/checkpoint-8", "--against", "checkpoints/checkpoint-4")
    asked = ("evaluate", *checkpoint, "--config", str(SETUP), "-n", "1", "--eval-replicates", "2", "--json", "out.json")
    with command(*asked, cwd=tmp_path, **env) as run:
        assert run.wait() == 0, run.output
    assert "checkpoint-8 less checkpoints/checkpoint-4, paired: 10 problems" in run.output
    result = read(tmp_path / "out.json")
    reward = {name: one["figures"]["reward_mean"]["value"] for name, one in result["models"].items()}
    difference = reward["checkpoints/checkpoint-8"] - reward["checkpoints/checkpoint-4"]
    assert result["difference"]["reward_mean"]["value"] == pytest.approx(difference)
