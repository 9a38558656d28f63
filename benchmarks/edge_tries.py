"""Changes of the optimizer's step that `edge.py` tries on stale rollouts; none of them is an option of a run.

`TRIES` has them by name. Each is called with a trainer whose rollouts come from elsewhere, before it trains, with
one optimizer step a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from async_grpo.training.corrections.trl_loss import Correction
from async_grpo.training.corrections.weights import loss_mask, ratios

SECOND_MOMENT = 0.04  # of the log ratios, in M2PO


def _as(kind: Callable[..., Correction], correction: Correction, **more: Any) -> Correction:
    """The same correction as one of class `kind`."""
    return kind(**{field.name: getattr(correction, field.name) for field in fields(correction)}, **more)


# --- The off-policy optimal baseline (VCPO, arXiv 2602.17616) ---------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OptimalBaseline(Correction):
    """Subtracts sum w^2 |g|^2 R / sum w^2 |g|^2 over a group, in place of its mean reward.

    g is the gradient of the log-probability of a sequence for the weights of all linear layers, w the product of its
    tokens' ratios pi / mu.
    """

    trainer: Any

    def __call__(self, batch: dict[str, Any]) -> None:
        super().__call__(batch)
        log_pi, squares = _squared_gradients(self.trainer, batch)
        w = ratios(log_pi, batch["sampling_per_token_logps"], loss_mask(batch), "sequence")[:, 0]
        groups = (-1, self.trainer.num_generations)
        weights = (w**2 * squares).view(groups)
        advantages = batch["advantages"].view(groups)  # (R - mean) / deviation: the baseline moves them all
        baseline = (weights * advantages).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1e-30)
        batch["advantages"] = (advantages - baseline).view(-1)


def _squared_gradients(trainer: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens, [B, C], and |g|^2 of each sequence, [B]."""
    squares = torch.zeros(len(batch["completion_ids"]))
    inputs: dict[Any, Tensor] = {}

    def forward(module: Any, args: tuple[Tensor], output: Any) -> None:
        inputs[module] = args[0].detach()
        output.register_hook(lambda gradient: add(module, gradient))

    def add(module: Any, gradient: Tensor) -> None:
        of_each = torch.einsum("bto,bti->boi", gradient, inputs.pop(module)[:, -gradient.shape[1] :])
        squares.add_(of_each.square().sum((1, 2)))

    linear = [module for module in trainer.model.modules() if isinstance(module, torch.nn.Linear)]
    handles = [module.register_forward_hook(forward) for module in linear]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    with torch.enable_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask, logits_to_keep=length + 1).logits[:, :-1]
        log_softmax = (logits / trainer.temperature).log_softmax(-1)
        log_pi = log_softmax.gather(2, batch["completion_ids"][:, :, None])[:, :, 0]
        torch.autograd.grad((log_pi * loss_mask(batch)).sum(), [module.weight for module in linear])
    for handle in handles:
        handle.remove()
    return log_pi.detach(), squares


def optimal_baseline(trainer: Any) -> None:
    trainer.correct = _as(OptimalBaseline, trainer.correct, trainer=trainer)


# --- Without what is aligned with the last gradient (GAC, arXiv 2603.01501) -------------------------------


class Unaligned(TrainerCallback):
    """Projects the part of the gradient out that is along the one before it, where the two agree."""

    def __init__(self) -> None:
        self._last: list[Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **kwargs: Any) -> None:
        own = [weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        now = [gradient.clone() for gradient in own]
        if self._last:
            along = sum((a * b).sum() for a, b in zip(own, self._last, strict=True))
            share = along / sum(last.square().sum() for last in self._last)
            for gradient, last in zip(own, self._last, strict=True):
                gradient.sub_(last * share.clamp(min=0.0))
        self._last = now


def unaligned(trainer: Any) -> None:
    trainer.add_callback(Unaligned())


# --- The second-moment mask (M2PO, arXiv 2510.01161) ------------------------------------------------------


class SecondMomentMask(Correction):
    """Leaves tokens out, those farthest from the sampler first, until the others' mean (log pi / mu)^2 is small."""

    def __call__(self, batch: dict[str, Any]) -> None:
        super().__call__(batch)
        batch["importance_sampling_ratio"] = torch.ones_like(batch["sampling_per_token_logps"])

    def in_loss(self, inputs: dict[str, Any], log_pi: Tensor) -> None:
        squares = (log_pi - inputs["sampling_per_token_logps"]).square()
        keep = squares <= largest_kept(squares[loss_mask(inputs)])
        inputs["importance_sampling_ratio"].copy_(keep)


def largest_kept(squares: Tensor, most: float = SECOND_MOMENT) -> Tensor:
    """The largest of these numbers that stays, so that the mean of all up to it is at most `most`."""
    smallest_first = squares.sort().values
    means = smallest_first.cumsum(0) / torch.arange(1, len(squares) + 1)
    return smallest_first[max(0, int((means <= most).sum()) - 1)]


def second_moment_mask(trainer: Any) -> None:
    trainer.correct = _as(SecondMomentMask, trainer.correct)


TRIES: dict[str, Callable[[Any], None]] = {
    "optimal baseline": optimal_baseline,
    "unaligned": unaligned,
    "second-moment mask": second_moment_mask,
}
