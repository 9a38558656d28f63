"""`--choose-prompts` in whole runs: killed and resumed, with any number of workers, and beside the filter."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from async_grpo.roles.replay import checkpoint_digest
from kit.runs import SETUP, audited, command, finish, steps_logged, weights_of_a_replay

pytestmark = pytest.mark.integration

STEPS = 14
FEW_ROWS = f"""
import os, sys, time
sys.path.insert(0, {str(SETUP.parent)!r})
import random_model

def reward(prompts, completions, **_):
    time.sleep(float(os.environ.get("TEST_REWARD_S", "0")))
    return [len(completion) * (prompt[0] != "0") for prompt, completion in zip(prompts, completions)]

def get_trainer():
    random_model.reward = reward
    trainer = random_model.get_trainer()
    trainer.train_dataset = trainer.train_dataset.select(range(4, 12))
    return trainer
"""
"""Eight rows, which four prompts a step pass many times: the rewards of the first four are always 0."""


@pytest.fixture
def few_rows(tmp_path: Path) -> Path:
    path = tmp_path / "few_rows.py"
    path.write_text(FEW_ROWS)
    return path


def chosen(folder: Path) -> list[int]:
    return [json.loads(line)["row"] for line in (folder / "worker/chosen.jsonl").read_text().splitlines()]


def train_killed(folder: Path, setup: Path, *options: str) -> str:
    """Kill the server after the checkpoint of step 4, and resume the run; what the resume printed."""
    folder.mkdir()
    with command("train", str(setup), *options, "-n", "2", cwd=folder, TEST_REWARD_S="0.1") as run:
        run.wait_until(lambda: len(steps_logged(folder / "worker")) >= 6, "step 6")
        run.server().kill()
        assert run.wait() != 0, run.output
    before = chosen(folder)
    output = finish(folder, "--resume", "-n", "1", setup=setup)
    assert "resuming from" in output
    assert chosen(folder)[: len(before)] == before, "each job keeps its row"
    return output


def test_the_death_of_a_run_that_chooses_changes_no_weight_and_rows_that_teach_nothing_are_rare(
    few_rows: Path, tmp_path: Path
) -> None:
    options = ("--steps", str(STEPS), "--deterministic", "--choose-prompts")
    one, killed = tmp_path / "one", tmp_path / "killed"
    one.mkdir()
    finish(one, *options, "-n", "1", setup=few_rows)
    train_killed(killed, few_rows, *options)
    assert chosen(killed) == chosen(one)
    of_row = Counter(chosen(one))
    assert sum(of_row[row] for row in range(4)) < sum(of_row[row] for row in range(4, 8)) / 2
    weights = [checkpoint_digest(folder / f"checkpoints/checkpoint-{STEPS}") for folder in (one, killed)]
    assert weights[0] == weights[1] == weights_of_a_replay(killed)
    assert f"OK: all {4 * STEPS} groups accounted for" in audited(killed / "worker")


@pytest.mark.slow
def test_a_resumed_run_that_chooses_and_filters_uses_what_was_generated(few_rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    output = train_killed(folder, few_rows, "--steps", str(STEPS), "--choose-prompts", "--filter-zero-variance")
    assert "OK: all" in audited(folder / "worker")
    assert not list((folder / "worker/quarantine").iterdir()), output
