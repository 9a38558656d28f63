"""The weights of stale tokens: ratios pi_old / mu of tokens or sequences, limited. Formulas and sources: `rule`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from async_grpo.training.corrections.rule import GEOMETRIC, TOKEN, Rule


def ratios(log_pi_old: Tensor, log_mu: Tensor, mask: Tensor, level: str) -> Tensor:
    """pi_old / mu: `[B, C]` of tokens, or `[B, 1]` of sequences.

    A token without a log-probability (NaN) counts as 1, as in TRL; so does a token that the loss does not count.

    Args:
        log_pi_old, log_mu: [B, C].
        mask: [B, C], bool, the tokens that the loss counts.
        level: "token": each token's own ratio. "sequence": their product. "geometric": their geometric mean.
    """
    logs = torch.nan_to_num((log_pi_old - log_mu).where(mask, 0.0), nan=0.0)
    if level != TOKEN:
        logs = logs.sum(dim=-1, keepdim=True)
    if level == GEOMETRIC:
        logs = logs / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.exp(logs)


def limited(ratio: Tensor, rule: Rule) -> Tensor:
    """The weight of each ratio: masked to 0 or clamped where it is outside the rule's bounds; the same shape."""
    if rule.masks:
        inside = (ratio >= rule.least) & (ratio <= rule.most)
        return torch.where(inside, ratio, 0.0)
    return ratio.clamp(rule.least, rule.most)


def loss_mask(batch: Mapping[str, Any]) -> Tensor:
    """Which tokens the loss counts, [B, C], bool."""
    mask: Tensor = batch["completion_mask"]
    return (mask if "tool_mask" not in batch else mask * batch["tool_mask"]).bool()
