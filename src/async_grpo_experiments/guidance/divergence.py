"""How far a policy q is from the reference π, in nats, over the whole vocabulary and at one temperature for both.

The avg_kl of an evaluation is the mean over completions sampled from q of Σ_t KL(q(·|s_t)‖π(·|s_t)): unbiased for the
KL of whole completions, and less noisy than the mean of Σ_t log q/π.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def divergence_of_offsets(logprobs_bV: Tensor, offsets_bV: Tensor) -> Tensor:
    """KL(q‖π) of q ∝ π·exp(o), from log π and finite offsets: [b].

    Offsets are taken from their greatest one on, so that a q that has all its mass there loses no digits.
    """
    shifted_bV = offsets_bV - offsets_bV.amax(dim=-1, keepdim=True)
    joint_bV = logprobs_bV + shifted_bV
    rest_b = torch.logsumexp(joint_bV, dim=-1)
    return (torch.softmax(joint_bV, dim=-1) * shifted_bV).sum(dim=-1) - rest_b


def divergence_of_policy(
    policy: Any, reference: Any, ids_BT: Tensor, mask_BT: Tensor, temperature: float = 1.0
) -> Tensor:
    """KL(q‖π) at each token of completions that the policy q has sampled: [B, T], 0 where the mask is.

    Args:
        policy: a causal language model; so is the reference.
        ids_BT: prompt and completion, padded on the right.
        mask_BT: 1 for tokens of the completion, the end token included.
    """
    with torch.no_grad():
        logq_BTV, logp_BTV = (
            torch.log_softmax(model(input_ids=ids_BT).logits[:, :-1].float() / temperature, dim=-1)
            for model in (policy, reference)
        )
        kl_BT = torch.where(logq_BTV == -torch.inf, 0.0, logq_BTV.exp() * (logq_BTV - logp_BTV)).sum(dim=-1)
    return torch.cat([kl_BT.new_zeros(len(ids_BT), 1), kl_BT], dim=1) * mask_BT
