"""Evaluation in a run that is killed in the middle of one, and of the run's checkpoint afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.runs import SETUP, Command, audited, command, finish, lines_of, ran, read

pytestmark = pytest.mark.integration

STALENESS = ("--max-staleness", "2")  # training waits for each evaluation before the next is due: none is skipped
EVALUATED = ("--eval-every", "4", "--eval-replicates", "2", "--eval-k", "1,2")
RUN = ("--distributed", "--num-workers", "2", *STALENESS, *EVALUATED)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder / "evaluations.jsonl")


def kill(run: Command, queue: Path) -> None:
    """End the launcher, and with it everything, in the middle of the first evaluation, after a worker died there."""
    run.kill_one_of_two_at_work(queue, "9")
    run.wait_until(lambda: any(queue.glob("9*_processing_by_dev*")), "the job of the dead worker on a live one")
    run.kill()


def test_a_run_that_is_killed_during_an_evaluation_has_each_once_and_its_checkpoint_can_be_evaluated(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "marker"
    env = {"TEST_EVAL": "10", "TEST_STEPS": "8", "TEST_REWARD": "held", "TEST_MARKER": str(marker)}
    with command("train", str(SETUP), *RUN, cwd=tmp_path, **env) as run:
        kill(run, tmp_path / "worker" / "queue")
    assert evaluations(tmp_path / "worker") == []
    marker.touch()
    said = finish(tmp_path, *RUN, "-n", "1", "--resume", **env)
    found = evaluations(tmp_path / "worker")
    assert [one["step"] for one in found] == [0, 4, 8], said
    for one in found:
        assert one["figures"]["pass@2"]["problems"] == 10
        assert one["failed"] == {}
    assert "OK: all 32 groups accounted for (" in audited(tmp_path / "worker")
    metrics = lines_of(tmp_path / "worker" / "metrics.jsonl")
    logged = {int(one["eval_version"]): one["eval_reward_mean"] for one in metrics if "eval_version" in one}
    assert logged == {one["step"]: one["figures"]["reward_mean"]["value"] for one in found}

    checkpoint = ("checkpoints/checkpoint-8", "--against", "checkpoints/checkpoint-4")
    asked = ("evaluate", *checkpoint, "--config", str(SETUP), "-n", "1", "--eval-replicates", "2", "--json", "out.json")
    assert "checkpoint-8 less checkpoints/checkpoint-4, paired: 10 problems" in ran(*asked, cwd=tmp_path, **env)
    result = read(tmp_path / "out.json")
    reward = {name: one["figures"]["reward_mean"]["value"] for name, one in result["models"].items()}
    difference = reward["checkpoints/checkpoint-8"] - reward["checkpoints/checkpoint-4"]
    assert result["difference"]["reward_mean"]["value"] == pytest.approx(difference)
