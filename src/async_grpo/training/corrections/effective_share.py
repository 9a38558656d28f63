"""The effective sample size of the sequences of an optimizer step, as a share of their number.

    ESS / n = (sum w)^2 / (n sum w^2),   w = exp sum_t (log pi(y_t) - log mu(y_t))

over the n sequences of the step; nothing is clipped. With fresh rollouts w is 1 and so is the share. The
log-probabilities are those of the loss, so there is no further forward pass. Of all micro-batches and ranks only
log sum w, log sum w^2 and n are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from async_grpo.training.corrections.metrics import Append
from async_grpo.training.corrections.weights import loss_mask

_FARTHEST = 1e6  # nats of a ratio that is infinite; twice of it is a number


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
