"""Whole runs of PPO, also by scripts/main_ppo.py: its critic is killed, resumed and replayed with the policy."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trl import GRPOTrainer

from async_grpo.credit import PPOTrainer
from async_grpo.roles.replay import checkpoint_digest
from async_grpo.setup.setup_file import load_trainer
from async_grpo.tasks import score
from async_grpo.verl_keys import Keys, planned
from async_grpo.verl_keys.keys import ACTOR, ROLLOUT
from async_grpo.verl_keys.trainer import trainer_from
from kit.runs import IN_MID_BATCH, SETUP, command, finish, kill_the_server_at, ran, steps_logged, weights_of_a_replay
from kit.several_ranks import EXAMPLES, config_of, same_training, same_weights
from kit.verl_files import write_model_and_tasks

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
    files = json.loads((last / "rollout_state.json").read_text())["files"]
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
            finish(folder, "-n", "1", "--deterministic", "--accelerate-config", config, *more, setup=setup, **env)
    same_training(several, one, steps=8)
    if setup == PPO:
        same_weights(several, one, 8, file="critic/model.safetensors")


# --- scripts/main_ppo.py: verl's keys become a setup file --------------------------------------------------------


SCRIPT = Path(__file__).parents[2] / "scripts" / "main_ppo.py"
LEAST = (
    *("actor_rollout_ref.model.path=model", "data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16"),
    *("data.max_prompt_length=8", "data.max_response_length=3", "trainer.default_local_dir=out"),
)
TASKS = "data.train_files={'math':'math.parquet','logic':'logic.parquet'}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in: a model, and a file of 160 rows for each of two tasks."""
    monkeypatch.chdir(tmp_path)
    write_model_and_tasks(tmp_path)
    return tmp_path


def test_the_setup_file_makes_the_trainer_of_the_keys(folder: Path) -> None:
    """3 epochs of 20 batches, in mini-batches of half a batch; of evaluated prompts the long ones are left out."""
    prompts = ["1+1="] * 15 + ["1+1+1+1+1="] * 5
    held_out = [{"data_source": "math__sums", "prompt": it, "reward_model": {"ground_truth": "2"}} for it in prompts]
    pq.write_table(pa.Table.from_pylist(held_out), "math__held_out.parquet")
    more = (f"{ROLLOUT}.n=2", "trainer.total_epochs=3", "data.filter_overlong_prompts=true", "mtl.method=pcgrad")
    evaluated = ("data.val_files=math__held_out.parquet", "data.val_max_samples=10", "trainer.test_freq=5")
    stops = ("trainer.early_stopping_patience=2",)
    run = planned(Keys.read([*LEAST, TASKS, f"{ACTOR}.ppo_mini_batch_size=8", *more, *evaluated, *stops]), lambda: 0)
    run.write()
    trainer = load_trainer(run.setup_file)
    assert isinstance(trainer, PPOTrainer)
    assert trainer.mtl == "pcgrad"
    passes = len(trainer.get_train_dataloader()) // trainer.args.gradient_accumulation_steps
    assert 3 * passes == trainer.args.max_steps == 3 * 20 * 2
    assert {task: rows["prompt"] for task, rows in trainer.eval_dataset.items()} == {"math": ["1+1="] * 10}


def test_grpo_and_an_argument_that_takes_the_place_of_the_keys(folder: Path) -> None:
    keys = Keys.read([*LEAST, TASKS, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "mtl.enabled=false"])
    trainer = trainer_from(planned(keys, lambda: 0).keys.given, reward_funcs=[score, score])
    assert (type(trainer), trainer.scale_rewards, len(trainer.reward_funcs)) == (GRPOTrainer, "group", 2)


@pytest.mark.slow
def test_a_killed_run_is_continued_by_the_same_command_and_replayed(folder: Path) -> None:
    """Two tasks, PPO and PCGrad; a replay makes the same weights."""
    keys = (*LEAST, TASKS, "mtl.method=pcgrad", "trainer.total_epochs=1", "trainer.save_freq=4")
    run_dir = folder / "out" / "run"
    with command(*keys, "--deterministic", cwd=folder, script=SCRIPT, OMP_NUM_THREADS="1") as run:
        run.wait_until(lambda: len(steps_logged(run_dir)) >= 6 if run_dir.exists() else False, "step 6")
        run.process.kill()
        assert run.wait() != 0, run.output
    assert "resuming" in ran(*keys, "--deterministic", cwd=folder, script=SCRIPT, OMP_NUM_THREADS="1")
    assert "nothing to do: run" in ran(*keys, "--deterministic", cwd=folder, script=SCRIPT)
    for check in (("audit", str(run_dir)), ("replay", str(run_dir), "-d", "cpu")):
        with command(*check, cwd=folder, OMP_NUM_THREADS="1") as run:
            assert run.wait() == 0, run.output
    assert f"SHA-256 {checkpoint_digest(folder / 'out' / 'checkpoint-20')}" in run.output
