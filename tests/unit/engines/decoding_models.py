"""Models, prompts and loops of decoding."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from async_grpo.engines.decoding import SamplingLoop

PAD, EOS = 0, 1
VOCABULARY = 24
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
GROUPS = [prompt for prompt in PROMPTS for _ in range(4)]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256, **HEADS}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS}
SHAPE: dict[str, Any] = {**SIZES, **TOKENS, "initializer_range": 0.5}  # far from uniform


def made(kind: str, **settings: Any) -> PreTrainedModel:
    """A tiny model of this type, with random weights of its own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHAPE, **settings})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def plain() -> PreTrainedModel:
    return made("qwen3", head_dim=8)


def with_sliding_window() -> PreTrainedModel:
    return made("qwen2", use_sliding_window=True, sliding_window=4, layer_types=["full_attention", "sliding_attention"])


class EndsByRow(LogitsProcessor):
    """Row i ends after `lengths[i % len(lengths)]` tokens: it keeps a state for each row, as some processors do."""

    def __init__(self, prompt_length: int, rows: int, lengths: tuple[int, ...]) -> None:
        self._prompt_length = prompt_length
        self._lengths_B = torch.tensor([lengths[row % len(lengths)] for row in range(rows)])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends_B = self._lengths_B == input_ids.shape[1] - self._prompt_length + 1
        scores[:, EOS] = torch.where(ends_B, torch.inf, -torch.inf)
        return scores


def config(**settings: Any) -> GenerationConfig:
    given = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS, **settings}
    return GenerationConfig(**given)


def padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    return torch.tensor(ids), (torch.tensor(ids) != PAD).long()


def inputs_of(prompts: list[list[int]], lengths: tuple[int, ...] | None = None, **settings: Any) -> dict[str, Any]:
    """What is given to `generate`."""
    ids, mask = padded(prompts)
    processors = LogitsProcessorList([EndsByRow(ids.shape[1], len(ids), lengths)] if lengths else [])
    asked = {"generation_config": config(**settings), "logits_processor": processors}
    return {"input_ids": ids, "attention_mask": mask, **asked}


def begin(model: PreTrainedModel, inputs: dict[str, Any], group_size: int = 1, **more: Any) -> SamplingLoop:
    sizes = [group_size] * (len(inputs["input_ids"]) // group_size)
    make = partial(SamplingLoop, temperature=1.0, pad_token_id=PAD, group_sizes=sizes, **more)
    loop = model.generate(**inputs, custom_generate=make)
    assert isinstance(loop, SamplingLoop)
    return loop


def run(loop: SamplingLoop) -> list[tuple[int, list[int]]]:
    """Decode to the end; returns each group that ended with the lengths of its completions, in that order."""
    told: list[tuple[int, list[int]]] = []
    with torch.no_grad():
        while not loop.ended:
            told += [(group, loop.lengths_B[rows].tolist()) for group, rows in loop.step().items()]
    return told


def completions(loop: SamplingLoop) -> Tensor:
    """All that was sampled, `[B, longest]`."""
    return loop.completions_BC[:, : int(loop.lengths_B.max())]
