"""Let TRL's asynchronous trainer run on a CPU, for trials and tests.

TRL computes attention over several sequences in one row with FlashAttention 3, which needs a GPU. TRL 1.15 asks for it
by name, and any attention of transformers gives the same where the positions begin anew with each sequence. TRL 1.16
brings an attention of its own, for rows that share their beginnings, that calls `flash_attn_varlen_func`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from async_grpo.setup.trl_compat import repair_trl


def let_trl_train_without_a_gpu() -> None:
    """Call it before an `AsyncGRPOTrainer` is made. Does nothing where there is a GPU; harmless to call twice."""
    if torch.cuda.is_available():
        return
    repair_trl()
    from trl.experimental.async_grpo import async_grpo_trainer as trl_async

    trl_async.get_peak_flops_per_device = lambda accelerator, dtype: None  # as of a GPU that TRL does not know
    if hasattr(trl_async, "TREE_ATTENTION"):
        from trl.experimental.async_grpo import packing

        packing._flash_attn = lambda: TorchAttention
    elif not isinstance(trl_async.create_model_from_path, functools.partial):
        trl_async.create_model_from_path = functools.partial(_with_torch_attention, trl_async.create_model_from_path)
    logger.info("without a GPU, TRL's asynchronous trainer gets torch's attention in place of FlashAttention 3")


def _with_torch_attention(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return create(*args, **{**kwargs, "attn_implementation": "sdpa"})


class TorchAttention:
    """What TRL 1.16 calls of FlashAttention 3, in plain torch."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Tensor,  # [N, H, D], the segments one after another
        key: Tensor,  # [K, h, D], for each segment the path that it sees; h divides H
        value: Tensor,  # [K, h, D]
        query_ends: Tensor,  # [S + 1], where segments end, from 0 on
        key_ends: Tensor,  # [S + 1]
        longest_query: int,
        longest_key: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float = 0.0,
    ) -> Tensor:
        """[N, H, D]: each segment attends to its path, whose last tokens it is."""
        assert causal and window_size[1] in (-1, 0), "TRL calls it like that"
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        lengths = [ends.diff().tolist() for ends in (query_ends, key_ends, key_ends)]
        segments = zip(*map(torch.split, (query, key, value), lengths), strict=True)
        return torch.cat([_attend(q, k, v, scale, window_size[0], softcap) for q, k, v in segments])


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """One segment. `window`: how many earlier tokens are seen; -1: all."""
    scores = torch.einsum("nhd,mhd->hnm", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = torch.arange(len(query), device=query.device)[:, None] + len(key) - len(query)  # that a query sees
    places = torch.arange(len(key), device=query.device)[None]
    hidden = places > last if window < 0 else (places > last) | (places < last - window)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
