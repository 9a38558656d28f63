"""The real engine on the tiny model of `qwen3_1m`: its weights, its outputs, and what the trainer computes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import qwen3_1m
import torch
from trl import GRPOTrainer

from async_grpo.engines import Chunk
from async_grpo.engines.vllm import VLLMEngine
from async_grpo.rollout.trl_trainer import RolloutTrainer

PROMPTS = [qwen3_1m.build_tokenizer()(text)["input_ids"] for text in ("1+1=", "7+3=", "a", "hello world", "0123456789")]
CLOSE = 1e-4 if qwen3_1m.DEVICE == "cpu" else 0.3  # fp32, bf16


def rollout_trainer(**changes: Any) -> GRPOTrainer:
    trainer = qwen3_1m.get_trainer()
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    RolloutTrainer(trainer)
    trainer.model.to(qwen3_1m.DEVICE, torch.bfloat16 if trainer.args.bf16 else torch.float32).eval()
    return trainer


def started(trainer: GRPOTrainer, **options: Any) -> Iterator[tuple[GRPOTrainer, VLLMEngine]]:
    """An engine for a fixture, and its trainer."""
    engine = VLLMEngine(trainer, seed=0, **options)
    yield trainer, engine
    engine.close()


def published(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def change(trainer: GRPOTrainer, seed: int) -> None:
    """As a training step would, but more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator).to(parameter))


def finish(engine: VLLMEngine) -> dict[str, tuple[list[int], list[float]]]:
    outputs: dict[str, tuple[list[int], list[float]]] = {}
    while engine.busy:
        collect(outputs, engine.step())
    return outputs


def collect(outputs: dict[str, tuple[list[int], list[float]]], chunks: list[Chunk]) -> None:
    for chunk in chunks:
        ids, logprobs = outputs.setdefault(chunk.request_id, ([], []))
        ids += chunk.tokens.ids
        logprobs += chunk.tokens.logprobs


def logprobs_of(trainer: GRPOTrainer, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """The log-probabilities that the trainer computes, [tokens]."""
    with torch.no_grad():
        tokens = torch.tensor([prompt + ids], device=qwen3_1m.DEVICE)
        logits = trainer.model(tokens).logits[0, len(prompt) - 1 : -1].float().cpu()
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def find_source(module: str) -> str:
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text()
