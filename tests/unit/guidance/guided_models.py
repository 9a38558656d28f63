"""A tiny reference, a head on it with weights of its own, and the engine that workers sample with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_grpo.engines.transformers import TransformersEngine
from async_grpo_experiments.guidance import Guidance, HeadRecord, ValueHead
from async_grpo_experiments.guidance.setup import TrainerGuidance
from kit.engines import transformers_of

PAD = END = 1  # one id
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
TOKENS, ROWS = 22, 24  # two rows of the embedding are padding


class Words:
    """What a tokenizer is to guidance."""

    pad_token_id = PAD

    def __init__(self, prefix: str = "w", count: int = TOKENS) -> None:
        self.name_or_path, self.prefix, self.count = f"words of {prefix}", prefix, count

    def get_vocab(self) -> dict[str, int]:
        return {f"{self.prefix}{index}": index for index in range(self.count)}


def reference(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": ROWS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    config = Qwen3Config(**sizes, **heads, pad_token_id=PAD, eos_token_id=END, initializer_range=0.3)
    return Qwen3ForCausalLM(config).eval()


def head_of(model: Any, *, trained: bool = True, **about: Any) -> ValueHead:
    record = HeadRecord.of(model, Words(), **{"kind": "value", "loss": "bce", "temperature": 1.0, **about})
    head = ValueHead.beginning_from(model, record, Words())
    if trained:
        torch.manual_seed(1)
        torch.nn.init.normal_(head.scores.weight, std=0.7)
    return head.eval()


def engine(model: Any, guidance: Guidance | None, *, tokens: int = 10, temperature: float = 1.0) -> TransformersEngine:
    guiding = None if guidance is None else TrainerGuidance(guidance)
    sampling = {"temperature": temperature}
    return transformers_of(model, tokens, PAD, END, sampling, guidance=guiding, tokenizer=Words())


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, padded on the left."""
    length = max(map(len, rows))
    ids = torch.tensor([[PAD] * (length - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])


def processors(guidance: Guidance, model: Any, mask: torch.Tensor | None, temperature: float = 1.0) -> Any:
    return guidance.processors(model, Words(), attention_mask=mask, temperature=temperature)
