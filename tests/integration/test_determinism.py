"""`--deterministic`: the same seed, the same weights, whoever generates and whoever dies; `replay`; chosen prompts."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_grpo.roles.replay import checkpoint_digest
from kit.runs import IN_MID_BATCH, SETUP, audited, command, finish, kill_the_server_at, lines_of, weights_of_a_replay
from kit.waiting import until_gone

STEPS = 24


def weights_of(folder: Path, step: int = STEPS) -> str:
    return checkpoint_digest(folder / "checkpoints" / f"checkpoint-{step}")


def train(folder: Path, *options: str, **env: str) -> str:
    return finish(folder, "--steps", str(STEPS), "--deterministic", *options, **env)


def ages(line: dict[str, Any]) -> list[int]:
    """In versions, of the groups of a line of the record."""
    return [line["version_used"] - version for version in line.get("policy_versions", [])]


STOPPED_SOON = ("train", str(SETUP), "--steps", str(STEPS), "--deterministic", "-n", "1", "--stop-grace", "600")


def undisturbed_and_empty(folder: Path) -> tuple[Path, Path]:
    """Folders of a run that nothing disturbs, trained, and of one to be stopped."""
    one, stopped = folder / "one", folder / "stopped"
    one.mkdir()
    stopped.mkdir()
    train(one, "-n", "1")
    return one, stopped


def test_any_number_of_workers_any_death_and_a_replay_give_the_same_weights(undisturbed: Path, tmp_path: Path) -> None:
    """The server is killed after a checkpoint in the middle of a generation batch, and continues from there."""
    expected = weights_of(undisturbed, 14)
    env = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}
    steps = ("--steps", "14")
    kill_the_server_at(9, tmp_path, *steps, "-n", "2", "--deterministic", **env)
    assert (tmp_path / "checkpoints/checkpoint-8/rollout_batch.safetensors").exists()
    output = finish(tmp_path, *steps, "-n", "1", "--deterministic", "--resume", **env)
    assert "resuming from" in output
    assert "whose weights are no more" not in output  # of a group that a later version had to sample
    assert weights_of(tmp_path, 14) == expected
    assert weights_of_a_replay(tmp_path, **env) == expected
    assert json.loads((tmp_path / "worker" / "run.json").read_text())["plan"]["training"]["deterministic"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, []),
        ({"num_iterations": 2, "steps_per_generation": 3}, []),
        ({"steps_per_generation": 3}, ["--train-of-group", "2"]),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, []),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 3}, ["--max-staleness", "0"]),
    ],
    ids=str,
)
def test_a_death_after_any_kind_of_checkpoint(tmp_path: Path, arguments: dict[str, int], options: list[str]) -> None:
    """Checkpoints are at steps 4, 8, …, so some lie between the optimizer steps of one generation batch.

    With `gradient_accumulation_steps` step 8 ends an epoch, and so a batch: there it is the checkpoint before. The last
    ones take several batches a step without staleness, as their groups come; 16 an epoch, so that its last step is one.
    """
    saved = 4 if "gradient_accumulation_steps" in arguments else 8
    env = {"TEST_GRPO": json.dumps(arguments)}
    one, killed = tmp_path / "one", tmp_path / "killed"
    one.mkdir()
    train(one, "-n", "1", *options, **env)
    kill_the_server_at(saved + 1, killed, "--deterministic", "--steps", str(STEPS), "-n", "3", *options, **env)
    in_mid_batch = (killed / f"checkpoints/checkpoint-{saved}/rollout_batch.safetensors").exists()
    assert in_mid_batch == (arguments.get("steps_per_generation", 1) > 1)
    train(killed, "-n", "2", "--resume", **env)
    assert weights_of(killed) == weights_of(one) == weights_of_a_replay(killed, **env)
    if "--max-staleness" in options:
        assert {age for line in lines_of(one / "worker" / "consumed.jsonl") for age in ages(line)} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_end_of_the_launcher_gives_the_same_weights(tmp_path: Path, number: signal.Signals) -> None:
    """Rewards are slow, so the server nearly always waits for the groups of the version that workers see."""
    one, stopped = undisturbed_and_empty(tmp_path)
    with command(*STOPPED_SOON, cwd=stopped, TEST_REWARD_S="0.3") as run:
        run.wait_until((stopped / "checkpoints/checkpoint-4/rollout_state.json").exists, "a checkpoint")
        children = run.children()
        run.process.send_signal(number)
        run.wait()
        until_gone(children)
    train(stopped, "-n", "2", "--resume")
    assert weights_of(stopped) == weights_of(one)


@pytest.mark.slow
def test_a_stop_before_the_first_step_gives_the_same_weights(tmp_path: Path) -> None:
    """The trainer waits for its first batch, and has opened the epoch's data."""
    one, stopped = undisturbed_and_empty(tmp_path)
    with command(*STOPPED_SOON, cwd=stopped, TEST_REWARD_S="120") as run:
        queue = stopped / "worker" / "queue"
        run.wait_until(lambda: list(queue.glob("*_processing_by_dev1*")), "a job at work")
        run.process.send_signal(signal.SIGTERM)
        run.wait()
    assert (stopped / "checkpoints" / "checkpoint-0").is_dir()
    train(stopped, "-n", "1", "--resume")
    assert weights_of(stopped) == weights_of(one)


# --- With prompts that are chosen --------------------------------------------------------------------------------


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
    kill_the_server_at(6, folder, *options, "-n", "2", setup=setup)
    before = chosen(folder)
    output = finish(folder, "--resume", "-n", "1", setup=setup)
    assert "resuming from" in output
    assert chosen(folder)[: len(before)] == before, "each job keeps its row"
    return output


def test_a_death_changes_no_weight_and_rows_that_teach_nothing_are_rare(few_rows: Path, tmp_path: Path) -> None:
    options = ("--steps", "14", "--deterministic", "--choose-prompts")
    one, killed = tmp_path / "one", tmp_path / "killed"
    one.mkdir()
    finish(one, *options, "-n", "1", setup=few_rows)
    train_killed(killed, few_rows, *options)
    assert chosen(killed) == chosen(one)
    of_row = Counter(chosen(one))
    assert sum(of_row[row] for row in range(4)) < sum(of_row[row] for row in range(4, 8)) / 2
    weights = [checkpoint_digest(folder / "checkpoints/checkpoint-14") for folder in (one, killed)]
    assert weights[0] == weights[1] == weights_of_a_replay(killed)
    assert "OK: all 56 groups accounted for" in audited(killed / "worker")


@pytest.mark.slow
def test_a_resumed_run_that_chooses_and_filters_uses_what_was_generated(few_rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    output = train_killed(folder, few_rows, "--steps", "14", "--choose-prompts", "--filter-zero-variance")
    assert "OK: all" in audited(folder / "worker")
    assert not list((folder / "worker/quarantine").iterdir()), output
