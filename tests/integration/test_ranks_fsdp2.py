"""A trainer that FSDP2 shards over several ranks, on the CPU with gloo: it trains as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.runs import IN_MID_BATCH, SETUP, finish, read
from kit.several_ranks import config_of, killed_resumed_and_stopped, same_training

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SHARDED_SETUP = SETUP.with_name("sharded_model.py")


@pytest.mark.parametrize("processes", [2, 4])
def test_sharded_ranks_train_an_adapter_as_one_process_does(
    processes: int, undisturbed_lora: Path, tmp_path: Path
) -> None:
    config = config_of("fsdp2.yaml", processes, tmp_path)
    options = ("-n", "1", "--deterministic", "--steps", "8", "--accelerate-config", str(config))
    finish(tmp_path, *options, setup=SHARDED_SETUP, TEST_MODEL="lora")
    same_training(tmp_path, undisturbed_lora, steps=8)
    last = tmp_path / "checkpoints" / "checkpoint-8"
    assert {path.name for path in last.glob("rng_state_*")} == {f"rng_state_{rank}.pth" for rank in range(processes)}
    assert read(last / "rollout_state.json")["step"] == 8


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
