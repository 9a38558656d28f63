"""A trainer that FSDP2 shards over several ranks, on the CPU with gloo: it trains as one process does."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from kit.runs import IN_MID_BATCH, SETUP, audited, command, finish, read, steps_logged
from kit.several_ranks import EXAMPLES, config_of, ranks, same_training
from kit.waiting import until_gone

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FSDP2 = str(EXAMPLES / "fsdp2.yaml")
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
    run_dir = tmp_path / "worker"
    with command(*arguments, cwd=tmp_path, **env) as run:
        run.wait_until(lambda: (tmp_path / "checkpoints/checkpoint-8/rollout_state.json").exists(), "a checkpoint")
        everybody = run.children()
        ranks(run)[-1].kill()
        assert run.wait() != 0, run.output
    named = re.search(r"Ranks? ([\d, ]+) of the trainer \(pids? [\d, ]+\) ha(s|ve) died", run.output)
    assert named is not None and str(processes - 1) in named[1].split(", "), run.output
    assert "Traceback" not in run.output, "each rank has found out who died"
    until_gone(everybody)

    step = max(steps_logged(run_dir))
    with command(*arguments, "--resume", cwd=tmp_path, **env) as run:
        run.wait_until(lambda: max(steps_logged(run_dir)) > step + 2, "steps after the resume")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 0, run.output
    assert read(run_dir / "run.json")["state"] == "stopped"
    assert "resuming from" in (run_dir / "log_parameter_server.txt").read_text()
    audited(run_dir)
    same_training(tmp_path, undisturbed, steps=11)


def test_two_sharded_ranks_go_on_as_four_between_batches(tmp_path: Path) -> None:
    """As one process that was resumed at the same step."""
    one, several = tmp_path / "one", tmp_path / "several"
    four = str(config_of("fsdp2.yaml", 4, tmp_path))
    env = {"TEST_MODEL": "lora", "TEST_GRPO": json.dumps({"lr_scheduler_type": "constant"})}
    for folder, configs in ((one, ("none", "none")), (several, (FSDP2, four))):
        folder.mkdir()
        for config, more in zip(configs, (("--steps", "4"), ("--steps", "8", "--resume")), strict=True):
            options = ("-n", "1", "--deterministic", "--accelerate-config", config)
            finish(folder, *options, *more, setup=SHARDED_SETUP, **env)
    same_training(several, one, steps=8)
