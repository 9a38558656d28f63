"""A trainer of several processes, on the CPU with gloo: the training of one; one writes; all end together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kit.runs import IN_MID_BATCH, SETUP, finish, logged, ran, read
from kit.several_ranks import EXAMPLES, config_of, figures, killed_resumed_and_stopped, same_training, same_weights

DDP = ("--accelerate-config", str(EXAMPLES / "ddp.yaml"))


def test_two_ranks_train_as_one_does_and_a_run_that_a_death_ends_is_resumed(undisturbed: Path, tmp_path: Path) -> None:
    """Checkpoint 8 is in the middle of a generation batch, of which each rank has its share."""
    arguments = ["train", str(SETUP), "-n", "1", "--deterministic", "--steps", "100000", *DDP]
    env = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}
    checkpoint = killed_resumed_and_stopped(tmp_path, arguments, env)
    assert {path.name for path in checkpoint.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}

    same_training(tmp_path, undisturbed, steps=11)
    same_weights(tmp_path, undisturbed, 4, 8)


@pytest.mark.slow
def test_a_checkpoint_in_mid_batch_is_refused_by_another_number_of_ranks(undisturbed: Path, tmp_path: Path) -> None:
    """Those without a share would wait for a batch that rank 0 has no reason to hand out."""
    folder = tmp_path / "of_one_rank"
    shutil.copytree(undisturbed, folder, ignore=shutil.ignore_patterns("*.pipe"))
    share = folder / "checkpoints/checkpoint-14/rollout_batch.safetensors"
    assert share.exists()
    resume = ["train", str(SETUP), "-n", "1", "--resume", "--steps", "15"]
    env = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}
    said = ran(*resume, *DDP, cwd=folder, **env, code=2)
    sentence = "was written in the middle of a generation batch by a trainer of {}, and this one has {}"
    assert sentence.format("1 rank", 2) in said
    log = (folder / "worker/log_parameter_server.txt").read_text()
    assert log.count(sentence.format("1 rank", 2)) == 1, "rank 0 has said so"
    assert "has died" not in log and "Traceback" not in log, "the other ended in silence"

    share.with_name("rollout_batch.rank1.safetensors").write_bytes(share.read_bytes())
    shown = ran(*resume, "--accelerate-config", "none", "--dry-run", cwd=folder, **env, code=2)
    assert sentence.format("2 ranks", 1) in shown


# --- Sharded by FSDP2 --------------------------------------------------------------------------------------------


SHARDED_SETUP = SETUP.with_name("sharded_model.py")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_sharded_ranks_train_an_adapter_as_one_process_does(count: int, undisturbed_lora: Path, tmp_path: Path) -> None:
    config = config_of("fsdp2.yaml", count, tmp_path)
    options = ("-n", "1", "--deterministic", "--steps", "8", "--accelerate-config", str(config))
    finish(tmp_path, *options, setup=SHARDED_SETUP, TEST_MODEL="lora")
    same_training(tmp_path, undisturbed_lora, steps=8)
    last = tmp_path / "checkpoints" / "checkpoint-8"
    assert {path.name for path in last.glob("rng_state_*")} == {f"rng_state_{rank}.pth" for rank in range(count)}
    assert read(last / "rollout_state.json")["step"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_sharded_ranks_are_resumed_in_the_middle_of_a_batch(processes: int, undisturbed: Path, tmp_path: Path) -> None:
    """A whole model; a rank is killed, and the run is stopped in the end."""
    config = config_of("fsdp2.yaml", processes, tmp_path)
    options = ["-n", "1", "--deterministic", "--steps", "100000", "--accelerate-config", str(config)]
    arguments = ["train", str(SHARDED_SETUP), *options]
    env = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}
    killed_resumed_and_stopped(tmp_path, arguments, env, rank=processes - 1)
    log = (tmp_path / "worker" / "log_parameter_server.txt").read_text()
    assert "resuming from" in log and "Traceback" not in log, "each rank has found out who died"
    same_training(tmp_path, undisturbed, steps=11)


@pytest.mark.slow
def test_two_sharded_ranks_go_on_as_four_between_batches(tmp_path: Path) -> None:
    """As one process that was resumed at the same step."""
    env = {"TEST_MODEL": "lora", "TEST_GRPO": json.dumps({"lr_scheduler_type": "constant"})}
    of_ranks = [str(config_of("fsdp2.yaml", count, tmp_path)) for count in (2, 4)]
    for name, configs in (("one", ["none", "none"]), ("several", of_ranks)):
        (tmp_path / name).mkdir()
        for config, more in zip(configs, (("--steps", "4"), ("--steps", "8", "--resume")), strict=True):
            options = ("-n", "1", "--deterministic", "--accelerate-config", config)
            finish(tmp_path / name, *options, *more, setup=SHARDED_SETUP, **env)
    same_training(tmp_path / "several", tmp_path / "one", steps=8)


# --- PCGrad ------------------------------------------------------------------------------------------------------


TASKS_SETUP = SETUP.with_name("several_tasks.py")
STEPS = 6
IN_PARTS = json.dumps({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})


def trained(folder: Path, config: str, **env: str) -> Path:
    folder.mkdir()
    options = ("-n", "1", "--deterministic", "--steps", str(STEPS), "--accelerate-config", config)
    finish(folder, *options, setup=TASKS_SETUP, **env)
    return folder


def measured(folder: Path) -> list[float]:
    return [entry[name] for entry in logged(folder / "worker") for name in ("mtl/cosine_min", "actor/long_loss")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "env"),
    [
        pytest.param("2", {}, id="as many rows of each task on each rank"),
        pytest.param("3", {}, id="other tasks on each rank"),
        pytest.param("2", {"TEST_SHARDED": "1"}, id="sharded"),
        pytest.param("3", {"TEST_SHARDED": "1"}, id="sharded, other tasks on each rank"),
    ],
)
def test_two_ranks_combine_gradients_as_one_process_does(tmp_path: Path, tasks: str, env: dict[str, str]) -> None:
    one = trained(tmp_path / "one", "none", TEST_TASKS=tasks)
    config = config_of("fsdp2.yaml" if env else "ddp.yaml", 2, tmp_path)
    two = trained(tmp_path / "two", str(config), TEST_TASKS=tasks, **env)
    same_training(two, one, steps=STEPS)
    assert measured(two) == pytest.approx(measured(one), abs=1e-4)
    assert min(measured(one)[::2]) < -0.1, "the tasks conflict"
    if not env:
        same_weights(two, one, 4)


@pytest.mark.slow
def test_two_ranks_accumulate_as_they_train_at_once(tmp_path: Path) -> None:
    """Two micro-batches a step, each with its share of each task."""
    config = config_of("fsdp2.yaml", 2, tmp_path)
    whole = trained(tmp_path / "whole", str(config), TEST_SHARDED="1")
    parts = trained(tmp_path / "parts", str(config), TEST_SHARDED="1", TEST_GRPO=IN_PARTS)
    same_training(parts, whole, steps=STEPS, accumulates=True)
    assert [entry["grad_norm"] for entry in figures(parts).values()]
