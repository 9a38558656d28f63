"""Off-policy correction: what the loss takes as the old policy of a rollout, and how it weighs what is stale.

mu is the policy that sampled, pi_old the trainer's at the start of the step, pi the one being trained, A the advantage,
w = pi_old / mu (a constant of the step). TRL's loss does the rest, for each of its loss types.

    bypass      ratio pi / mu in TRL's own clipped loss; no forward pass more
    decoupled   ratio pi / pi_old, times min(w, 5)         (AReaL, arXiv 2505.24298)
    tis         ratio pi / pi_old, times min(w, 2)         (truncated importance sampling; verl's and slime's constant)
    icepop      ratio pi / pi_old, times w if 0.5 <= w <= 5, else 0
    none        ratio pi / pi_old: stale rollouts are taken as fresh ones. Collapses when they are not.

The weight multiplies the advantages, token by token: as it is not negative, that is the same as weighing the loss
(min(r w A, clip(r) w A) = w min(r A, clip(r) A)), before the KL term. VESPO is not linear in its advantage, and
takes the weight as its own `importance_sampling_ratio`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_grpo.errors import UnsupportedError

Append = Callable[[str, float], None]
LogProbs = Callable[[dict[str, Any]], Tensor]  # the loss's inputs -> log pi_old, [B, C]


@dataclass(frozen=True, slots=True)
class Weight:
    """w, limited: `[B, C]` in, `[B, C]` out."""

    least: float
    most: float
    drop_outside: bool  # to 0, instead of limiting to the nearest bound

    def __call__(self, ratio: Tensor) -> Tensor:
        if self.drop_outside:
            inside = (ratio >= self.least) & (ratio <= self.most)
            return ratio * inside
        return ratio.clamp(self.least, self.most)


WEIGHTS = {
    "decoupled": Weight(0.0, 5.0, drop_outside=False),
    "tis": Weight(0.0, 2.0, drop_outside=False),
    "icepop": Weight(0.5, 5.0, drop_outside=True),
}


@dataclass(frozen=True, slots=True)
class Correction:
    """Sets the correction `name` on a generation batch that TRL has assembled.

    Args:
        log_pi_old: one forward pass without gradient over the batch; called by the corrections that need it.
        append: adds a value to the training metrics.
    """

    name: str
    loss_type: str
    log_pi_old: LogProbs
    append: Append

    def __call__(self, batch: dict[str, Any]) -> None:
        """`batch["sampling_per_token_logps"]` is log mu, [B, C]; what is set depends on the correction."""
        if self.name == "bypass":
            bypass(batch)
        elif self.name in WEIGHTS:
            self._weigh(batch, WEIGHTS[self.name])

    def _weigh(self, batch: dict[str, Any], weight: Weight) -> None:
        old = batch.get("old_per_token_logps")
        old = self.log_pi_old(batch) if old is None else old
        batch["old_per_token_logps"] = old
        mask = loss_mask(batch)
        ratio = torch.exp(old - batch["sampling_per_token_logps"]).where(mask, 1.0)
        limited = weight(ratio)
        if self.loss_type == "vespo":
            batch["importance_sampling_ratio"] = limited
        else:
            batch["advantages"] = batch["advantages"].unsqueeze(1) * limited
        self._report(ratio[mask], limited[mask])

    def _report(self, ratio: Tensor, limited: Tensor) -> None:
        changed = ratio != limited
        self.append("async/weight_changed_fraction", changed.float().mean().item())
        self.append("async/weight_dropped_fraction", (limited == 0).float().mean().item())


def bypass(batch: dict[str, Any]) -> None:
    """Take the sampler's log-probabilities as the old ones."""
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"]


def loss_mask(batch: dict[str, Any]) -> Tensor:
    """Which tokens the loss counts, [B, C], bool."""
    mask = batch["completion_mask"]
    return (mask if "tool_mask" not in batch else mask * batch["tool_mask"]).bool()


def report_ratio(batch: dict[str, Any], log_pi: Tensor, append: Append) -> None:
    """Metrics of pi / mu over a micro-batch, before anything is limited.

    Args:
        log_pi: [B, C], of the policy in training.
    """
    if "sampling_per_token_logps" not in batch:
        return
    mask = loss_mask(batch)
    if not mask.any():
        return
    difference = (log_pi - batch["sampling_per_token_logps"]).where(mask, 0.0)
    ratio = torch.exp(difference[mask])
    append("async/ratio_mean", ratio.mean().item())
    append("async/ratio_min", ratio.min().item())
    append("async/ratio_max", ratio.max().item())
    append("async/effective_sample_size", (ratio.sum() ** 2 / (ratio.numel() * (ratio**2).sum())).item())
    fresh = mask & (batch["staleness"] == 0)[:, None]
    if fresh.any():  # what is left at equal versions is the mismatch of sampler and trainer
        append("async/logprob_mismatch", difference[fresh].abs().mean().item())


def check(name: str, trainer: Any) -> None:
    """Raise `UnsupportedError` where this correction would be wrong for this trainer's loss."""
    if name in WEIGHTS and trainer.args.off_policy_mask_threshold is not None:
        raise UnsupportedError(
            f"off_policy_mask_threshold masks whole sequences, which --correction {name} would make a decision for "
            "each token. Remove it, or take --correction bypass."
        )
