"""A trainer of two processes, on the CPU with gloo: the training of one; one writes; all end together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kit.runs import IN_MID_BATCH, SETUP, ran
from kit.several_ranks import EXAMPLES, killed_resumed_and_stopped, same_training, same_weights

pytestmark = pytest.mark.integration

DDP = ("--accelerate-config", str(EXAMPLES / "ddp.yaml"))


def test_two_ranks_train_as_one_process_does_and_one_that_dies_ends_the_run_which_can_be_resumed(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Checkpoint 8 is in the middle of a generation batch, of which each rank has its share."""
    arguments = ["train", str(SETUP), "-n", "1", "--deterministic", "--steps", "100000", *DDP]
    env = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}
    checkpoint = killed_resumed_and_stopped(tmp_path, arguments, env)
    assert {path.name for path in checkpoint.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}

    same_training(tmp_path, undisturbed, steps=11)
    same_weights(tmp_path, undisturbed, 4, 8)


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_of_a_batch_is_refused_by_another_number_of_ranks(
    undisturbed: Path, tmp_path: Path
) -> None:
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
