"""Metrics of what corrections do: ratios, clipped and limited tokens, for short and long completions apart.

Long completions are staler: they were begun earlier. `is_long` in a batch says which of its completions are longer
than their median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_grpo.training.corrections.weights import loss_mask

Append = Callable[[str, float], None]
Batch = Mapping[str, Any]

CLIPPING_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # those that report clip_ratio/* in TRL


@dataclass(frozen=True, slots=True)
class Clip:
    """The range in which TRL's loss leaves the ratio pi / pi_old alone."""

    least: float
    most: float
    of_sequences: bool  # the ratio is a sequence's geometric mean (importance_sampling_level="sequence")


def report_ratio(batch: Batch, log_pi: Tensor, version: int, append: Append) -> None:
    """Metrics of pi / mu over a micro-batch, before anything is limited.

    The mean of r - 1 - log r over tokens that mu sampled is an estimate of KL(mu || pi) without bias, never below 0:
    k3 of J. Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.

    Args:
        log_pi: [B, C], of the policy in training.
        version: of that policy.
    """
    mask = loss_mask(batch)
    difference = torch.nan_to_num((log_pi - batch["sampling_per_token_logps"]).where(mask, 0.0), nan=0.0)
    if not mask.any():
        return
    ratio = torch.exp(difference[mask])
    append("async/ratio_mean", ratio.mean().item())
    append("async/ratio_min", ratio.min().item())
    append("async/ratio_max", ratio.max().item())
    append("async/kl_to_sampler", (torch.expm1(difference[mask]) - difference[mask]).mean().item())
    append("async/effective_sample_size", (ratio.sum() ** 2 / (ratio.numel() * (ratio**2).sum())).item())
    fresh = mask & (batch["policy_version"] == version)[:, None]
    if fresh.any():  # what is left at equal versions is the mismatch of sampler and trainer
        append("async/logprob_mismatch", difference[fresh].abs().mean().item())


def report_weights(batch: Batch, ratio: Tensor, weights: Tensor, append: Append) -> None:
    """How many tokens have a weight that was limited, or dropped to 0. `ratio` and `weights` are [B, C]."""
    for half, tokens in _halves(batch):
        append(f"async/weight_changed_fraction{half}", _share((ratio != weights)[tokens]))
        append(f"async/weight_dropped_fraction{half}", _share((weights == 0)[tokens]))


def report_clipped(batch: Batch, log_pi: Tensor, clip: Clip, append: Append) -> None:
    """How many tokens of short and of long completions TRL's loss clips (its `clip_ratio/region_mean` is of all)."""
    mask, advantages = loss_mask(batch), batch["advantages"]
    logs = (log_pi - batch.get("old_per_token_logps", log_pi)).where(mask, 0.0)
    if clip.of_sequences:
        logs = logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(logs)
    per_token = advantages[:, None] if advantages.dim() == 1 else advantages
    clipped = ((ratio < clip.least) & (per_token < 0)) | ((ratio > clip.most) & (per_token > 0))
    for half, tokens in _halves(batch):
        if half:
            append(f"async/clip_fraction{half}", _share(clipped.expand_as(mask)[tokens]))


def _halves(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """All tokens that the loss counts, those of shorter completions, and those of longer ones; only where any are."""
    mask = loss_mask(batch)
    halves = [("", mask)]
    if "is_long" in batch:
        long = batch["is_long"][:, None]
        halves += [("_short", mask & ~long), ("_long", mask & long)]
    for half, tokens in halves:
        if tokens.any():
            yield half, tokens


def _share(tokens: Tensor) -> float:
    return tokens.float().mean().item()
