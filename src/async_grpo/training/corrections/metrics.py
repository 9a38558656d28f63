"""Metrics of what corrections do: ratios, clipped and limited tokens, effective samples.

Long completions are staler: they were begun earlier. `is_long` in a batch says which of its completions are longer
than their median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from async_grpo.training.corrections.weights import loss_mask

Append = Callable[[str, float], None]
Batch = Mapping[str, Any]

CLIPPING_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # those that report clip_ratio/* in TRL
_FARTHEST = 1e6  # nats of a ratio that is infinite; twice of it is a number


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


def log_ratios(log_pi: Tensor, log_mu: Tensor, mask: Tensor) -> Tensor:
    """log w of each sequence of which the loss counts anything: [n], float64.

    A token without a log-probability (NaN) has the ratio 1, as in the weights of corrections.
    """
    logs = (log_pi.double() - log_mu.double()).where(mask, 0.0)
    logs = torch.nan_to_num(logs, nan=0.0, posinf=_FARTHEST, neginf=-_FARTHEST)
    return logs.sum(dim=-1)[mask.any(dim=-1)]


def sums_of(logs: Tensor) -> Tensor:
    """[log sum w, log sum w^2, n] of ratios whose logarithms are `logs`."""
    return torch.stack([logs.logsumexp(0), (2 * logs).logsumexp(0), logs.new_tensor(logs.numel())])


def effective_share(sums: Tensor) -> float:
    """ESS / n of all ratios whose sums are rows of `sums`, [parts, 3]; 1 where there are none."""
    log_sum, log_squares, count = sums[:, 0].logsumexp(0), sums[:, 1].logsumexp(0), sums[:, 2].sum().item()
    return min(1.0, exp((2 * log_sum - log_squares).item()) / count) if count else 1.0


class EffectiveShare(TrainerCallback):
    """Reports `async/ess_sequences` of each optimizer step; nothing where the loss shows no log-probabilities.

    It is the effective sample size of the n sequences of the step, as a share of their number; nothing is clipped:

        ESS / n = (sum w)^2 / (n sum w^2),   w = exp sum_t (log pi(y_t) - log mu(y_t))

    With fresh rollouts w is 1 and so is the share. The log-probabilities are those of the loss, so there is no further
    forward pass. Of all micro-batches and ranks only log sum w, log sum w^2 and n are kept.

    Args:
        gather: concatenates a tensor of each rank, in the first dimension.
        append: adds a value to the training metrics.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor], append: Append) -> None:
        self._gather, self._append = gather, append
        self._sums: list[Tensor] = []  # of the micro-batches of this step

    def saw(self, inputs: Mapping[str, Any], log_pi: Tensor) -> None:
        """A micro-batch was trained on, with the log-probabilities `log_pi`, [B, C]."""
        self._sums.append(sums_of(log_ratios(log_pi, inputs["sampling_per_token_logps"], loss_mask(inputs))))

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        if self._sums:
            self._append("async/ess_sequences", effective_share(self._gather(torch.stack(self._sums))))
            self._sums.clear()
