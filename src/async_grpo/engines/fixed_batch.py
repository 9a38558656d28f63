"""A batch in buffers of fixed shapes and addresses, for forward passes over one token a row.

transformers knows caches of a fixed length (`StaticCache`). Here rows may leave as well, the part that is read grows
with the rows, and no key is copied for the query heads that share it.

Shapes: R rows, L tokens of each at most; a pass is over the first `rows` and reads the first `tokens` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.masking_utils import sdpa_mask

ATTENTION = "async_grpo_one_token"  # its name among the implementations of transformers


class KeyValueMemory:
    """Memory for keys and values that batches of other rows and lengths take in turn, at the same addresses.

    Args:
        like: a cache with these heads, widths and numbers.
        kind: what the memory depends on besides its size, to be compared.
        tokens: of all rows together.
        dtype: of what is float32 in the cache; mixed precision multiplies in it.
    """

    def __init__(self, like: Cache, kind: tuple[Any, ...], tokens: int, dtype: torch.dtype | None) -> None:
        self.kind, self.tokens = kind, tokens
        self._layers = [
            [
                it.new_zeros(tokens * it.shape[1] * it.shape[3], dtype=dtype if it.dtype == torch.float32 else it.dtype)
                for it in (layer.keys, layer.values)
            ]
            for layer in like.layers
        ]

    def layer(self, index: int, like: DynamicLayer, rows: int, tokens: int) -> list[Tensor]:
        """Keys and values `[rows, heads, tokens, width]`."""
        return [
            memory[: rows * tokens * it.shape[1] * it.shape[3]].view(rows, it.shape[1], tokens, it.shape[3])
            for memory, it in zip(self._layers[index], (like.keys, like.values), strict=True)
        ]


class FixedBatch:
    """Tokens, positions, mask, keys and values of the rows, and what the next pass is over.

    Args:
        like: the cache of the prompts; keys and values have its shapes.
        positions_bL: of the prompts, `[3, b, L]` for some models.
    """

    def __init__(self, like: Cache, positions_bL: Tensor, rows: int, tokens: int, memory: KeyValueMemory) -> None:
        self.most_rows, self.most_tokens = self.rows, self.tokens = rows, tokens
        self.position = torch.zeros((), dtype=torch.long, device=positions_bL.device)  # of the tokens in their rows
        self.tokens_R1 = positions_bL.new_zeros(rows, 1, dtype=torch.long)
        self.positions_R1 = positions_bL.new_zeros(*positions_bL.shape[:-2], rows, 1)
        self._mask_RL = torch.ones(rows, tokens, dtype=torch.bool, device=positions_bL.device)
        self._layers = [
            _FixedLayer(self, layer.is_sliding, *memory.layer(index, layer, rows, tokens))
            for index, layer in enumerate(like.layers)
        ]
        self.cache = Cache(layers=[*self._layers])

    def take(self, cache: Cache, mask_bL: Tensor | None, positions_bL: Tensor) -> None:
        """Put the prompts in; the next tokens stand behind them."""
        rows, length = cache.layers[0].keys.shape[0], positions_bL.shape[-1]
        self.position.fill_(length)
        self.tokens_R1.zero_()
        self.positions_R1.fill_(length)
        self.positions_R1[..., :rows, :] = positions_bL[..., -1:] + 1
        self._mask_RL.fill_(True)
        if mask_bL is not None:
            self._mask_RL[:rows, :length] = mask_bL.bool()
        for mine, theirs in zip(self._layers, cache.layers, strict=True):
            mine.take(theirs, length)

    def select(self, stay: Tensor) -> None:
        """Move these rows to the front."""
        positions_R1 = self.positions_R1.movedim(-2, 0)
        for part in (self._mask_RL, positions_R1, *(it for layer in self._layers for it in (layer.keys, layer.values))):
            part[: len(stay)] = part[stay]

    def inputs(self) -> dict[str, Any]:
        """Inputs of `prepare_inputs_for_generation`, for the pass that comes."""
        return {
            "input_ids": self.tokens_R1[: self.rows],
            "attention_mask": self._mask_RL[: self.rows, : self.tokens],
            "position_ids": self.positions_R1[..., : self.rows, :],
            "past_key_values": self.cache,
        }

    def count_up(self) -> None:
        """Move on by one token."""
        self.position += 1
        self.positions_R1 += 1


class _FixedLayer(CacheLayerMixin):
    is_compileable = True  # so that transformers makes whole masks, of one shape

    def __init__(self, batch: FixedBatch, is_sliding: bool, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._batch, self.is_sliding, self.keys, self.values = batch, is_sliding, keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffers are there."""

    def take(self, prompts: DynamicLayer, length: int) -> None:
        """Take keys and values of prompts of `length` tokens; a layer with a sliding window has the last of them.

        What an earlier batch left is removed: even where it is masked, one NaN would make all of a row NaN.
        """
        for mine, theirs in ((self.keys, prompts.keys), (self.values, prompts.values)):
            rows, _, tokens, _ = theirs.shape
            mine.zero_()
            mine[:rows, :, length - tokens : length] = theirs

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token of each row; returns all keys and values of the pass."""
        rows, tokens = self._batch.rows, self._batch.tokens
        position = self._batch.position.view(1)
        keys, values = self.keys[:rows, :, :tokens], self.values[:rows, :, :tokens]
        keys.index_copy_(2, position, key_states.to(keys.dtype))
        values.index_copy_(2, position, value_states.to(values.dtype))
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that are read, and the position of the first."""
        return self._batch.tokens, 0

    def get_seq_length(self) -> Tensor:
        """The position of the next token, as a tensor: a graph reads it."""
        return self._batch.position

    def get_max_length(self) -> int:
        """Tokens of a row at most."""
        return self._batch.most_tokens


def shapes_of(cache: Cache) -> list[tuple[Any, ...]]:
    """What buffers of a cache depend on besides rows and tokens."""
    return [(it.shape[1], it.shape[3], it.dtype) for layer in cache.layers for it in (layer.keys, layer.values)]


@contextmanager
def one_token_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model attend by `_attend`, with masks of `_mask`."""
    config = model.config.get_text_config(decoder=True)
    before, config._attn_implementation = config._attn_implementation, ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The query heads that share a key head are its queries: nothing has to be copied for them.

    Shapes: query `[R, heads, 1, d]`, key and value `[R, key heads, L, d]`, the result `[R, 1, heads, d]`.
    """
    if others.get("position_bias") is not None:
        raise NotImplementedError("attention with a bias of its own")
    rows, heads, _, width = query.shape
    shared = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    mixed = scaled_dot_product_attention(shared, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(rows, 1, heads, value.shape[-1]), None


def _mask(*, dtype: torch.dtype, **asked: Any) -> Tensor:
    """Make a mask `[R, 1, 1, L]`, 0 where a token is seen, else minus infinity: once a pass, not in each layer."""
    seen = sdpa_mask(**{**asked, "allow_is_causal_skip": False})
    kind = seen.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, _mask)
