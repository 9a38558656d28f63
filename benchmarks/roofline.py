"""The least time that a GPU can take for decoding and for training, from two limits of its own that are measured.

Decoding reads all weights and all keys and values at each token, and multiplies each completion by all weights. A
training step multiplies all tokens by the layers, and completions by the head, forwards and backwards, once: nothing
is computed again. What is left out makes these limits harder to reach, never easier: a prompt's own forward pass,
sampling, the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the limits depend on."""

    layers: int  # parameters of all layers
    head: int  # parameters of the output layer
    cache_bytes: int  # keys and values of one token, in all layers
    attention: int  # products that one query and one key cost, in all layers
    value_bytes: int

    @classmethod
    def of(cls, config: Any, *, value_bytes: int) -> Model:
        """A model with Qwen3's layers, from its configuration; norms are left out."""
        hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        return cls(
            layers=count * hidden * (2 * queries + 2 * keys + 3 * inner),
            head=hidden * config.vocab_size,
            cache_bytes=count * 2 * keys * value_bytes,
            attention=count * queries,
            value_bytes=value_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The limits of a GPU."""

    bytes_s: float  # memory traffic, bytes read and bytes written
    flops_s: float  # of a product of matrices in the model's number format


def decoding_s(model: Model, card: Card, prompts: Sequence[int], tokens: int, *, shared_by: int = 1) -> float:
    """Least seconds for `tokens` tokens of each completion, all in one batch.

    Args:
        prompts: tokens of each completion's prompt.
        shared_by: completions for which the keys and values of their prompt are read once.
    """
    weights = model.layers + model.head
    each_s = max(weights * model.value_bytes / card.bytes_s, 2 * weights * len(prompts) / card.flops_s)
    read = tokens * sum(prompts) / shared_by + len(prompts) * tokens * (tokens - 1) / 2  # tokens, over all steps
    return tokens * each_s + read * model.cache_bytes / card.bytes_s


def training_s(model: Model, card: Card, prompts: Sequence[int], completions: Sequence[int]) -> float:
    """Least seconds for a forward and a backward pass over these tokens, without padding."""
    lengths = [sum(pair) for pair in zip(prompts, completions, strict=True)]
    products = model.layers * sum(lengths) + model.head * sum(completions)
    products += model.attention * sum(length**2 for length in lengths)  # scores and sums over the half that is seen
    return 3 * 2 * products / card.flops_s


def evenly(most: int, count: int) -> list[int]:
    """Lengths from a quarter of `most` up to it."""
    return [round(most * (1 + 3 * index / max(count - 1, 1)) / 4) for index in range(count)]


# --- The card's own limits --------------------------------------------------------------------------------


def measure_card(device: str, dtype: Any) -> Card:
    """Copy within the memory, and multiply matrices; the fastest time counts."""
    import torch

    size, side = (1024 * MIB, 8192) if device == "cuda" else (64 * MIB, 512)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = fastest_s(lambda: target.copy_(source), device)
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    result = torch.empty_like(matrix)
    product_s = fastest_s(lambda: torch.mm(matrix, matrix, out=result), device)
    return Card(bytes_s=2 * size / copy_s, flops_s=2 * side**3 / product_s)


def fastest_s(work: Callable[[], Any], device: str, *, together: int = 10, repeats: int = 20) -> float:
    """Seconds of one call; several are queued together, so that a launch is not counted."""
    import torch

    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(together):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / together)
    return min(seconds)
