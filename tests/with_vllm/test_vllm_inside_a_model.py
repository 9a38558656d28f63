"""A model with a vLLM engine inside, as Unsloth's `fast_inference=True` makes it.

It is a real `LLM`, with the settings that Unsloth gives it, but with weights of its own in place of shared ones.
Unsloth itself needs a GPU (`tests/gpu`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qwen3_1m
import torch
from engines_of_vllm import CLOSE, PROMPTS, change, finish, logprobs_of, published

from async_grpo.engines.vllm import ENVIRONMENT, VLLMEngine
from async_grpo.errors import UnsupportedError
from async_grpo.rollout.trl_trainer import RolloutTrainer


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The worker's, with a LoRA adapter and the engine that `load_vllm` of unsloth_zoo would start."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    os.environ["TEST_LORA"] = "1"
    made: Any = qwen3_1m.get_trainer()
    del os.environ["TEST_LORA"]
    made.args.temperature = 0.7
    folder: Path = tmp_path_factory.mktemp("model")
    qwen3_1m.build_model(made.processing_class).save_pretrained(folder)
    made.processing_class.save_pretrained(folder)
    made.model.vllm_engine = LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=32,
        max_logprobs=0,
        logprobs_mode="processed_logprobs",
        seed=0,
        enable_lora=True,
        max_lora_rank=16,
        max_loras=1,
        enforce_eager=True,
    )
    made.args.use_vllm = made.use_vllm = True
    RolloutTrainer(made)
    made.model.eval()
    yield made
    made.model.vllm_engine.llm_engine.engine_core.shutdown()


def test_the_adapter_of_each_version_is_used(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.lora.request

    request = vllm.lora.request.LoRARequest
    unsloths = lambda lora_name, lora_int_id, lora_path: request(lora_name, lora_int_id, lora_path)  # noqa: E731
    monkeypatch.setattr(vllm.lora.request, "LoRARequest", unsloths)  # which has none of the newer arguments
    engine = VLLMEngine(trainer, seed=1)
    assert (engine.max_num_seqs, engine.versions_at_once) == (32, 1)
    for version in range(3):
        change(trainer, seed=50 + version)
        engine.load(published(trainer), version)
        for index, prompt in enumerate(PROMPTS):
            engine.submit(f"{version}-{index}", prompt, seed=None, version=version)
        outputs = finish(engine)
        for index, prompt in enumerate(PROMPTS):
            ids, logprobs = outputs[f"{version}-{index}"]
            right = logprobs_of(trainer, prompt, ids, 0.7)
            torch.testing.assert_close(torch.tensor(logprobs), right, atol=CLOSE, rtol=0)
        assert len(engine._engine.list_loras()) == 1


def test_two_workers_do_not_draw_the_same(trainer: Any) -> None:
    """Unsloth's engines all start with the same seed."""

    def draw(seed: int) -> list[list[int]]:
        engine = VLLMEngine(trainer, seed=seed)
        engine.load(published(trainer), version=seed)
        for index, prompt in enumerate(PROMPTS):
            engine.submit(f"{seed}-{index}", prompt, seed=None, version=seed)
        return [ids for _, (ids, _) in sorted(finish(engine).items())]

    first = draw(101)
    assert draw(101) == first
    assert draw(102) != first


def test_another_base_is_refused(trainer: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in published(trainer).items()}
    weights["base_model.model.model.norm.weight"] += 0.5
    with pytest.raises(UnsupportedError, match=r"norm\.weight.*fast_inference=False"):
        VLLMEngine(trainer, seed=0).load(weights, version=9)
