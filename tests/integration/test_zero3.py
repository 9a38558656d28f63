"""A trainer that DeepSpeed shards over several ranks, on the CPU with gloo: it trains as one process does.

`make test-zero3` makes an environment with DeepSpeed, and runs these tests there.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.training.sharding import read_without_pickle
from kit.runs import IN_MID_BATCH, SETUP, finish, ran, read
from kit.several_ranks import EXAMPLES, config_of, killed_resumed_and_stopped, same_training, same_weights

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed here: `make test-zero3`"),
]

ZERO3 = ("--accelerate-config", str(EXAMPLES / "zero3.yaml"))
LOADED_SETUP = SETUP.with_name("loaded_model.py")


@pytest.fixture(autouse=True)
def the_extension_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed compiles one on a CPU, with a lock that a killed process leaves; `deepspeed_env.sh` has compiled it."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "extensions"))
    monkeypatch.setenv("PATH", f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}")  # ninja


def test_two_ranks_train_as_one_does_and_a_run_that_a_death_ends_is_resumed(undisturbed: Path, tmp_path: Path) -> None:
    """Checkpoint 8 is in the middle of a generation batch, of which each rank has its share."""
    arguments = ["train", str(SETUP), "-n", "1", "--deterministic", "--steps", "100000", *ZERO3]
    env = {"TEST_GRPO": json.dumps(IN_MID_BATCH)}
    checkpoint = killed_resumed_and_stopped(tmp_path, arguments, env)
    assert len(list(checkpoint.glob("global_step*/*_optim_states.pt"))) == 2
    same_training(tmp_path, undisturbed, steps=11)
    same_weights(tmp_path, undisturbed, 4, 8)
    another_number_and_another_kind_are_refused(arguments, tmp_path, env)


def another_number_and_another_kind_are_refused(arguments: list[str], folder: Path, env: dict[str, str]) -> None:
    """DeepSpeed cannot divide optimizer state anew, and without it the state would be left out in silence."""
    for checkpoint in (folder / "checkpoints").glob("checkpoint-*"):
        for share in checkpoint.glob("rollout_batch*"):  # as at the end of a batch, whose shares are checked first
            share.unlink()
        state = read(checkpoint / "rollout_state.json")
        files = {name: digest for name, digest in state["files"].items() if not name.startswith("rollout_batch")}
        (checkpoint / "rollout_state.json").write_text(json.dumps({**state, "passes_done": 0, "files": files}))
    four = ("--accelerate-config", str(config_of("zero3.yaml", 4, folder)))
    sentence = "was written by a trainer with DeepSpeed over 2 ranks, and this one trains {}"
    for options, needed in (
        (four, "with DeepSpeed over 4 ranks"),
        ((*four, "--dry-run"), "with DeepSpeed over 4 ranks"),
        (("--accelerate-config", str(EXAMPLES / "ddp.yaml")), "without FSDP or DeepSpeed"),
    ):
        assert sentence.format(needed) in ran(*arguments, "--resume", *options, cwd=folder, **env, code=2)


def test_two_ranks_train_an_adapter_as_one_process_does(undisturbed_lora: Path, tmp_path: Path) -> None:
    options = ("-n", "1", "--deterministic", "--steps", "8", *ZERO3)
    finish(tmp_path, *options, TEST_MODEL="lora")
    same_training(tmp_path, undisturbed_lora, steps=8)
    same_weights(tmp_path, undisturbed_lora, 4, 8, file="adapter_model.safetensors")
    last = tmp_path / "checkpoints" / "checkpoint-8"
    assert not (last / "model.safetensors").exists()
    assert read(last / "rollout_state.json")["step"] == 8


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loaded_model_with_a_tied_head_is_trained_and_resumed(stage: int, tmp_path: Path) -> None:
    """At stage 3 `from_pretrained` shards it at once, and no parameter stays whole. At stage 2 every rank has all."""
    one, two = tmp_path / "one", tmp_path / "two"
    config = with_a_file_of_deepspeeds(stage, tmp_path)
    grpo = {"gradient_accumulation_steps": 2, "beta": 0.1, "lr_scheduler_type": "constant"}
    for folder, accelerate in ((one, "none"), (two, str(config))):
        folder.mkdir()
        options = ("-n", "1", "--deterministic", "--accelerate-config", accelerate)
        finish(folder, *options, "--steps", "4", setup=LOADED_SETUP, TEST_GRPO=json.dumps(grpo))
        finish(folder, *options, "--steps", "8", "--resume", setup=LOADED_SETUP, TEST_GRPO=json.dumps(grpo))
    same_training(two, one, steps=8, accumulates=True)
    same_weights(two, one, 4, 8)
    described = [read(folder / "worker" / "run.json")["model"] for folder in (one, two)]
    assert described[0] == described[1], "as of whole parameters"


def with_a_file_of_deepspeeds(stage: int, folder: Path) -> Path:
    """An accelerate configuration that names one: then accelerate wants DeepSpeed's settings there and only there."""
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    of_stage_3 = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    zero = {"stage": stage, "reduce_bucket_size": 100_000, **of_stage_3}
    (folder / "deepspeed.json").write_text(json.dumps({**dict.fromkeys(sizes, "auto"), "zero_optimization": zero}))
    lines = (EXAMPLES / "zero3.yaml").read_text().split("deepspeed_config:")[0].splitlines()
    kept = [line for line in lines if not line.startswith("mixed_precision")]
    config = folder / "zero.yaml"
    config.write_text("\n".join([*kept, "deepspeed_config:", f"  deepspeed_config_file: {folder}/deepspeed.json", ""]))
    return config


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[Path]]:
            return Path.touch, (tmp_path / "touched",)

    torch.save({"optimizer_state_dict": Evil()}, tmp_path / "states.pt")
    read_without_pickle()
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        TorchCheckpointEngine().load(str(tmp_path / "states.pt"))
    assert not (tmp_path / "touched").exists()
