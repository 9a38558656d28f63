"""Whole runs of PPO: a critic is trained in the server, killed and resumed with it, and replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_grpo.roles.replay import checkpoint_digest
from kit.runs import IN_MID_BATCH, SETUP, finish, kill_the_server_at, read, weights_of_a_replay
from kit.several_ranks import EXAMPLES, config_of, same_training, same_weights

pytestmark = pytest.mark.integration

PPO, TASKS = SETUP.with_name("ppo_model.py"), SETUP.with_name("several_tasks.py")


def test_a_death_leaves_policy_and_critic_as_a_replay_makes_them(tmp_path: Path) -> None:
    """The server is killed after a checkpoint in the middle of a generation batch, and continues from there."""
    env = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}
    options = ("--steps", "8", "--deterministic", "-n", "1")
    kill_the_server_at(5, tmp_path, *options, setup=PPO, **env)
    first, last = (tmp_path / "checkpoints" / f"checkpoint-{step}" for step in (4, 8))
    assert (first / "rollout_batch.safetensors").exists()
    assert "resuming from" in finish(tmp_path, *options, "--resume", setup=PPO, **env)
    assert checkpoint_digest(first / "critic") != checkpoint_digest(last / "critic"), "the critic trains"
    files = read(last / "rollout_state.json")["files"]
    assert {"critic/model.safetensors", "critic/optimizer.safetensors"} <= files.keys()
    assert weights_of_a_replay(tmp_path, **env) == checkpoint_digest(last)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["ddp.yaml", "fsdp2.yaml"])
def test_two_ranks_train_the_critic_of_one(example: str, tmp_path: Path) -> None:
    """With a resume in the middle of a generation batch, and of a critic that one of them shards over both."""
    accumulates = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
    env = {"TEST_GRPO": json.dumps({**IN_MID_BATCH, **accumulates}), "TEST_SHARDED": str(int("fsdp" in example))}
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    options = ("-n", "1", "--max-staleness", "0", "--deterministic", "--accelerate-config")
    finish(one, *options, "none", "--steps", "8", setup=PPO, **env)
    for more in (("--steps", "5"), ("--steps", "8", "--resume")):
        finish(two, *options, str(EXAMPLES / example), *more, setup=PPO, **env)
    same_training(two, one, steps=8, accumulates=True)
    same_weights(two, one, 8, file="critic/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "example", "after"),
    [(PPO, "ddp.yaml", 1), (PPO, "fsdp2.yaml", 4), (TASKS, "ddp.yaml", 1), (TASKS, "fsdp2.yaml", 4)],
    ids=["critic, ddp", "critic, fsdp2", "tasks, ddp", "tasks, fsdp2"],
)
def test_two_ranks_go_on_as_another_number(setup: Path, example: str, after: int, tmp_path: Path) -> None:
    """Between two batches, as one process that was resumed at the same step."""
    env = {"TEST_GRPO": json.dumps({"lr_scheduler_type": "constant"}), "TEST_SHARDED": "1" * ("fsdp" in example)}
    one, several = tmp_path / "one", tmp_path / "several"
    later = "none" if after == 1 else str(config_of(example, after, tmp_path))
    for folder, configs in ((one, ("none", "none")), (several, (str(EXAMPLES / example), later))):
        folder.mkdir()
        for config, more in zip(configs, (("--steps", "4"), ("--steps", "8", "--resume")), strict=True):
            options = ("-n", "1", "--deterministic", "--accelerate-config", config)
            finish(folder, *options, *more, setup=setup, **env)
    same_training(several, one, steps=8)
    if setup == PPO:
        same_weights(several, one, 8, file="critic/model.safetensors")
