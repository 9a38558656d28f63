"""How far a trained policy is from the reference: both pass once over the tokens that an evaluation of it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from async_grpo.evals.estimators import Estimate, problems_with_interval, range_of
from async_grpo.records import RolloutGroup
from async_grpo_experiments.guidance.divergence import divergence_of_policy
from async_grpo_experiments.loop_progress import told


def divergence_of_groups(
    groups: Sequence[RolloutGroup], policy: Any, reference: Any, temperature: float
) -> dict[str, Estimate]:
    """Estimate `avg_kl` and `avg_kl_per_token` as means over problems, as a guided evaluation has them.

    Args:
        groups: of the evaluation, one a problem.
        temperature: at which they were sampled.
    """
    values: dict[str, list[float]] = {"avg_kl": [], "avg_kl_per_token": []}
    for group in told(groups, "problems are compared with the reference"):
        ids_BT, mask_BT = (one.to(policy.device) for one in _padded(group))
        nats = float(divergence_of_policy(policy, reference, ids_BT, mask_BT, temperature).sum())
        values["avg_kl"].append(nats / len(ids_BT))
        values["avg_kl_per_token"].append(nats / float(mask_BT.sum()))
    return {name: problems_with_interval(found, range_of(name)) for name, found in values.items() if found}


def _padded(group: RolloutGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and completion of each row, and which tokens are of the completion: [B, T], padded on the right."""
    prompt, ids = (torch.from_numpy(one).long() for one in (group.prompt_ids, group.completion_ids))
    completions = torch.split(ids, group.completion_lengths.tolist())
    masks = [torch.cat([torch.zeros_like(prompt), torch.ones_like(one)]) for one in completions]
    return pad_sequence([torch.cat([prompt, one]) for one in completions], True), pad_sequence(masks, True)
