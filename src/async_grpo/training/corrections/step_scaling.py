"""The optimizer's step made smaller by how far the batch is from the policy in training: the scale of a learning rate.

    scale = sqrt(ESS / n),   ESS = (sum w)^2 / sum w^2,   w = exp sum_t (log pi(y_t) - log mu(y_t))

over the n sequences of one optimizer step, or its n tokens, each with its own ratio; nothing is clipped. With fresh
rollouts w is 1 and so is the scale. Stable Asynchrony (VCPO), arXiv 2602.17616, scales the rate by the square root of
the effective sample size of sequences; the learning rate of the scheduler stays as it is.

The log-probabilities are those of the loss, so there is no further forward pass. Of all micro-batches and ranks only
log sum w, log sum w^2 and n are kept. Nothing stays in the optimizer: before the scheduler looks, each rate is back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp, sqrt
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from async_grpo.errors import UnsupportedError
from async_grpo.training.corrections.metrics import Append
from async_grpo.training.corrections.weights import loss_mask

UNITS = {"off": "sequences", "ess": "sequences", "ess-token": "tokens"}  # by `--step-scaling`: what has one ratio
_FARTHEST = 1e6  # nats of a ratio that is infinite; twice of it is a number


def log_ratios(log_pi: Tensor, log_mu: Tensor, mask: Tensor, unit: str) -> Tensor:
    """log w of each sequence, or token, of which the loss counts anything: [n], float64.

    A token without a log-probability (NaN) has the ratio 1, as in the weights of corrections.
    """
    logs = (log_pi.double() - log_mu.double()).where(mask, 0.0)
    logs = torch.nan_to_num(logs, nan=0.0, posinf=_FARTHEST, neginf=-_FARTHEST)
    return logs[mask] if unit == "tokens" else logs.sum(dim=-1)[mask.any(dim=-1)]


def sums_of(logs: Tensor) -> Tensor:
    """[log sum w, log sum w^2, n] of ratios whose logarithms are `logs`."""
    return torch.stack([logs.logsumexp(0), (2 * logs).logsumexp(0), logs.new_tensor(logs.numel())])


def effective_share(sums: Tensor) -> float:
    """ESS / n of all ratios whose sums are rows of `sums`, [parts, 3]; 1 where there are none."""
    log_sum, log_squares, count = sums[:, 0].logsumexp(0), sums[:, 1].logsumexp(0), sums[:, 2].sum().item()
    return min(1.0, exp((2 * log_sum - log_squares).item()) / count) if count else 1.0


class StepScaling(TrainerCallback):
    """Reports the effective sample size of each optimizer step, and multiplies every rate by its scale meanwhile.

    Args:
        unit: "sequences" or "tokens".
        gather: concatenates a tensor of each rank, in the first dimension.
        append: adds a value to the training metrics.
        scales: False: the rates stay as they are, and a loss without log-probabilities has no effective sample size.
    """

    def __init__(self, unit: str, gather: Callable[[Tensor], Tensor], append: Append, *, scales: bool = True) -> None:
        self._unit, self._gather, self._append, self._scales = unit, gather, append, scales
        self._sums: list[Tensor] = []  # of the micro-batches of this step
        self._rates: list[Any] = []  # of the optimizer's groups, while they are scaled

    def saw(self, inputs: Mapping[str, Any], log_pi: Tensor) -> None:
        """A micro-batch was trained on, with the log-probabilities `log_pi`, [B, C]."""
        logs = log_ratios(log_pi, inputs["sampling_per_token_logps"], loss_mask(inputs), self._unit)
        self._sums.append(sums_of(logs))

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **kwargs: Any) -> None:
        if not self._sums and not self._scales:
            return
        if not self._sums:
            raise UnsupportedError(
                "--step-scaling needs the log-probabilities of the loss, and this trainer's loss does not compute them "
                "by TRL's _get_per_token_logps_and_entropies. Leave --step-scaling out."
            )
        share = effective_share(self._gather(torch.stack(self._sums)))
        self._sums.clear()
        self._append(f"async/ess_{self._unit}", share)
        if self._scales:
            self._append("async/rate_scale", sqrt(share))
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * sqrt(share)

    def on_optimizer_step(self, *_: Any, optimizer: Any, **kwargs: Any) -> None:
        if self._scales:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
