"""Adapters: only what trains is published, workers adopt it without merging, and sample what the trainer computes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOTrainer

from async_grpo.engines.policy import PolicyWeights
from async_grpo.errors import UnsupportedError
from async_grpo.records import RolloutGroup
from async_grpo.training.trl_trainer import refuse_unsupported
from async_grpo_ipc import WeightExporter, open_remote_memory
from kit.in_process import InProcessRun
from kit.runs import SETUP, command, finish
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer

TOLERANCE = 1e-5
STEPS = 4
LEARNING_RATE = 2e-2  # so that each version is clearly another policy


def lora(**changes: Any) -> LoraConfig:
    """An adapter that is not the identity from the start."""
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], **changes})


class SharedWeightsRun(InProcessRun):
    """A run whose worker gets its weights as a real one does: from what an exporter of the trainer publishes."""

    def __init__(self, get_trainer: Callable[[], GRPOTrainer], handle: Path) -> None:
        super().__init__(get_trainer, correction="trl")  # which computes the trainer's log-probabilities, too
        self.exporter = WeightExporter.from_model(self.trainer.model, handle)
        self.remote = open_remote_memory(handle)
        self.policy = PolicyWeights(self.remote, self.worker.model)
        self.differences: list[float] = []  # of each version, the largest between sampler and trainer

    def close(self) -> None:
        self.remote.close()
        self.exporter.close()

    def take_groups(self, version: int) -> Sequence[RolloutGroup]:
        self.exporter.publish(version)
        assert self.policy.adopt() == version
        self.memory = {p.untyped_storage().data_ptr() for p in self.worker.model.parameters()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(version)
            self._version = version
            groups = self._generate()
        self.remote.release()
        self.batches.append(groups)
        return groups

    def _corrected(self, batch: dict[str, Any]) -> None:
        super()._corrected(batch)
        mask = batch["completion_mask"].bool()
        difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask]
        self.differences.append(difference.abs().max().item())


ADAPTERS: dict[str, LoraConfig] = {
    "LoRA": lora(),
    "rank-stabilised": lora(use_rslora=True, lora_alpha=8),
    "DoRA": lora(use_dora=True),
    "whole modules beside the adapter": lora(modules_to_save=["norm"]),
    "a trained copy of the tied head": lora(modules_to_save=["lm_head"]),
    "trained tokens of the tied head": lora(trainable_token_indices=[1, 2]),
    "the tied embedding": lora(target_modules=["q_proj", "embed_tokens"]),
    "the base's biases": lora(bias="all"),
    "all linear layers": lora(target_modules="all-linear"),
}


def steps(tmp_path: Path, config: LoraConfig | None, model: Any = None, **changes: Any) -> Callable[[], GRPOTrainer]:
    def get_trainer() -> GRPOTrainer:
        torch.manual_seed(1)  # the random half of an adapter is drawn by TRL
        return build_trainer(
            tmp_path,
            model=None if model is None else model(),
            arguments={} if config is None else {"peft_config": config},
            **{"max_steps": STEPS, "learning_rate": LEARNING_RATE, "max_completion_length": 16, **changes},
        )

    return get_trainer


def train(get_trainer: Callable[[], GRPOTrainer], tmp_path: Path, tolerance: float = TOLERANCE) -> SharedWeightsRun:
    """Train, and check what holds for every adapter."""
    run = SharedWeightsRun(get_trainer, tmp_path / "handle.json")
    try:
        run.train()
        handle = (tmp_path / "handle.json").read_text()
        (tmp_path / "handle.copy.json").write_text(handle)
        only_what_trains_is_published(run, json.loads(handle))
    finally:
        run.close()
    assert len(run.differences) == STEPS
    assert max(run.differences) < tolerance, run.differences
    assert len(run.memory) == 1, "the worker has weights of its own: all should lie in the shared memory"
    assert all(entry["grad_norm"] > 0 for entry in run.logs)
    return run


def only_what_trains_is_published(run: SharedWeightsRun, handle: dict[str, Any]) -> None:
    parameters = dict(run.trainer.model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert {tensor["name"] for tensor in handle["slot"]["tensors"]} == trained
    assert {tensor["name"] for tensor in handle["static"]["tensors"]} == set(parameters) - trained
    assert trained != set(parameters)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_sampler_is_the_trainer_at_every_version(name: str, tmp_path: Path, record_property: Any) -> None:
    run = train(steps(tmp_path, ADAPTERS[name]), tmp_path)
    record_property("largest_difference", max(run.differences))


def test_what_a_version_weighs(tmp_path: Path) -> None:
    """A slot has the adapter's bytes and the padding between its tensors, not the base's."""
    trainer: Any = steps(tmp_path, lora())()
    sizes = {True: 0, False: 0}
    for parameter in trainer.model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes
    with WeightExporter.from_model(trainer.model, tmp_path / "handle.json"):
        handle = json.loads((tmp_path / "handle.json").read_text())
    published = {name: payload(handle[name]) for name in ("slot", "static")}
    assert published == {"slot": sizes[True], "static": sizes[False]}
    assert sizes[True] < sizes[False] / 3


def payload(layout: dict[str, Any]) -> int:
    return sum(math.prod(tensor["shape"]) * 4 for tensor in layout["tensors"])  # fp32


def already_adapted(trainable: bool = True) -> Callable[[], PeftModel]:
    """The tiny model with a random adapter that was made before the trainer."""

    def build() -> PeftModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = get_peft_model(build_model(build_tokenizer()), lora(init_lora_weights=False))
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad and trainable)
        return model

    return build


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_that_was_there_before(beta: float, tmp_path: Path) -> None:
    """With beta, TRL adds a frozen copy of the adapter as the reference."""
    run = train(steps(tmp_path, None, already_adapted(), beta=beta), tmp_path)
    assert any(".ref." in name for name, _ in run.trainer.model.named_parameters()) == (beta > 0)


def test_a_model_of_which_nothing_trains_is_refused(tmp_path: Path) -> None:
    trainer = steps(tmp_path, None, already_adapted(trainable=False))()
    with pytest.raises(UnsupportedError, match="no parameter that trains"):
        refuse_unsupported(trainer)


@pytest.mark.parametrize("adapter", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused(adapter: Any, tmp_path: Path) -> None:
    virtual = adapter(task_type="CAUSAL_LM", num_virtual_tokens=4)
    trainer = build_trainer(tmp_path, gradient_checkpointing=False, arguments={"peft_config": virtual})
    with pytest.raises(UnsupportedError, match=rf"{adapter.__name__}.*4 virtual tokens.*LoraConfig.*one process"):
        refuse_unsupported(trainer)


def test_gradient_checkpointing_leaves_the_worker_its_cache(tmp_path: Path) -> None:
    lengths: list[int] = []

    def get_trainer() -> GRPOTrainer:
        trainer = steps(tmp_path, lora(), gradient_checkpointing=True)()
        embedding: Any = trainer.model.get_input_embeddings()
        embedding.register_forward_pre_hook(lambda _, it: lengths.append(it[0].shape[1]) if decoding(trainer) else None)
        return trainer

    train(get_trainer, tmp_path)
    prefills = STEPS  # one batch a step
    assert len(lengths) > prefills
    assert sum(length > 1 for length in lengths) <= prefills, "a decoding step should read one token, not all again"


def decoding(trainer: Any) -> bool:
    return not hasattr(trainer, "events")  # it is the worker's


# --- Quantised bases -------------------------------------------------------------------------------------------

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
BF16_TOLERANCE = 1e-3  # TRL keeps the adapter of a quantised model in bf16, whose sums depend on their order


@pytest.fixture
def base_on_disk(tmp_path: Path) -> Path:
    """bitsandbytes quantises blocks of 64 weights while a model is loaded."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path / "base"
    build_model(build_tokenizer(), hidden_size=64, intermediate_size=128, head_dim=32).save_pretrained(folder)
    return folder


def in_4_bits(folder: Path, **changes: Any) -> Callable[[], Any]:
    quantisation = BitsAndBytesConfig(**{**NF4, **changes})
    return lambda: AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantisation, device_map="cpu")


@pytest.mark.parametrize("double", [False, True], ids=["scales", "scales of scales"])
def test_qlora_shares_the_quantised_base(double: bool, base_on_disk: Path, tmp_path: Path) -> None:
    model = in_4_bits(base_on_disk, bnb_4bit_use_double_quant=double)
    run = train(steps(tmp_path, lora(), model), tmp_path, tolerance=BF16_TOLERANCE)
    handle = json.loads((tmp_path / "handle.copy.json").read_text())
    packed = [tensor for tensor in handle["static"]["tensors"] if tensor["dtype"] == "uint8"]
    assert len(packed) == 2 * 7  # q, k, v, o, gate, up and down of two layers
    assert run.logs[-1]["grad_norm"] > 0


def test_a_base_that_was_quantised_differently_is_refused(base_on_disk: Path, tmp_path: Path) -> None:
    ours, theirs = in_4_bits(base_on_disk), in_4_bits(base_on_disk, bnb_4bit_quant_type="fp4")
    handle = tmp_path / "handle.json"
    trained = get_peft_model(ours(), lora())
    with WeightExporter.from_model(trained, handle) as exporter, open_remote_memory(handle) as remote:
        exporter.publish(1)
        policy = PolicyWeights(remote, get_peft_model(theirs(), lora()))
        with pytest.raises(UnsupportedError, match="are not those of the trainer"):
            policy.adopt()


# --- A run of processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_adapter(undisturbed_lora: Path, tmp_path: Path) -> None:
    """Killed after the checkpoint of step 4 and resumed: the checkpoints hold the adapter and nothing of the base."""
    options = ("-n", "1", "--deterministic", "--steps", "8")
    with command("train", str(SETUP), *options, cwd=tmp_path, TEST_MODEL="lora", TEST_REWARD_S="0.3") as run:
        run.wait_until(lambda: (tmp_path / "checkpoints/checkpoint-4/rollout_state.json").exists(), "a checkpoint")
        for process in [*run.children(), psutil.Process(run.process.pid)]:
            process.kill()
        run.process.wait()
    assert "resuming from" in finish(tmp_path, *options, "--resume", TEST_MODEL="lora")
    last = tmp_path / "checkpoints" / "checkpoint-8"
    assert not (last / "model.safetensors").exists()
    adapter = load_file(last / "adapter_model.safetensors")
    assert all("lora" in name for name in adapter)
    first = load_file(tmp_path / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors")
    assert all(not adapter[name].equal(first[name]) for name in adapter)
    expected = load_file(undisturbed_lora / "checkpoints" / "checkpoint-8" / "adapter_model.safetensors")
    assert all(adapter[name].equal(expected[name]) for name in expected)
