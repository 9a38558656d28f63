"""The formulas of PPO with a critic, as functions of tensors: advantages, value loss, KL penalty and its coefficient.

Shapes are [B, T]: B completions, padded to T tokens. `mask` is 1 where the policy wrote a token that counts.
Generalised advantage estimation: Schulman et al., arXiv 1506.02438, eq. 16. The value loss is that of PPO2 in OpenAI's
baselines. The estimators of KL are those of Schulman, "Approximating KL divergence" (2020), under verl's names, and the
adaptive coefficient is that of Ziegler et al., arXiv 1909.08593, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from async_grpo.credit.formulas import turn_starts

KL_PENALTIES = ("kl", "abs", "mse", "low_var_kl")
_LEAST_VARIANCE = 1e-8  # below it advantages are not scaled up


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns [B, T], both 0 outside the mask.

    Tokens outside the mask are skipped: the token before them is followed by the next one that the policy wrote.
    """
    value_after, advantage_after = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    counts = mask.bool()
    for at in reversed(range(values.shape[1])):
        error = rewards[:, at] + gamma * value_after - values[:, at]
        here = counts[:, at]
        advantage_after = torch.where(here, error + gamma * lam * advantage_after, advantage_after)
        value_after = torch.where(here, values[:, at], value_after)
        advantages[:, at] = torch.where(here, advantage_after, 0.0)
    return advantages, torch.where(counts, advantages + values, 0.0)


def whitened(advantages: Tensor, mask: Tensor, everywhere: Callable[[Tensor], Tensor]) -> Tensor:
    """Shift and scale advantages [B, T] to mean 0 and variance 1 (with Bessel's correction); 0 outside the mask.

    Args:
        everywhere: the values of all processes, given those of this one, [N].
    """
    counts = mask.bool()
    known = everywhere(advantages[counts])
    if len(known) < 2:
        return torch.zeros_like(advantages)
    scaled = (advantages - known.mean()) * torch.rsqrt(known.var() + _LEAST_VARIANCE)
    return torch.where(counts, scaled, 0.0)


def rewards_of_tokens(
    outcomes: Tensor, turns: Sequence[Sequence[float]], masks: Sequence[Sequence[int]], width: int
) -> Tensor:
    """Put rewards on tokens, [B, T] with T = `width`: that of a turn on its last token, R^O on the last of all.

    Args:
        outcomes: R^O of each completion, [B]; NaN: none.
        turns: a reward for each turn of each completion; NaN: none.
        masks: of each completion, 1 for a token that the policy wrote.
    """
    rewards = outcomes.new_zeros(len(masks), width)
    for row, outcome, of_turns, mask in zip(rewards, outcomes.tolist(), turns, masks, strict=True):
        ends = _turn_ends(mask)
        for end, reward in zip([*ends, *ends[-1:]], [*of_turns, *[outcome] * len(ends[-1:])], strict=True):
            row[end] += 0.0 if reward != reward else reward
    return rewards


def _turn_ends(mask: Sequence[int]) -> list[int]:
    """Where the runs of 1 end. `[1, 1, 0, 1]` -> `[1, 3]`."""
    return [len(mask) - 1 - start for start in reversed(turn_starts(mask[::-1]))]


def value_losses(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Compute the loss of each value, and whether the clipped one decides it; both of the shape of `values`."""
    near = torch.clamp(values, old - clip, old + clip)
    errors, clipped = (values - returns) ** 2, (near - returns) ** 2
    return 0.5 * torch.max(errors, clipped), clipped > errors


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """Compute the share of the variance of `returns` that `values` explain, both [N]; 1 is all of it."""
    if len(returns) < 2:
        return float("nan")
    return float(1.0 - (returns - values).var() / (returns.var() + 1e-5))


def kl_penalties(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) of sampled tokens from their log-probabilities, by one of `KL_PENALTIES`."""
    log_ratio = logprobs - reference
    if kind == "kl":
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    if kind == "mse":
        return 0.5 * log_ratio**2
    if kind == "low_var_kl":
        back = torch.clamp(-log_ratio, -20.0, 20.0)
        return torch.clamp(torch.exp(back) - back - 1.0, -10.0, 10.0)
    raise ValueError(f"kl_penalty must be one of {', '.join(KL_PENALTIES)}, got {kind!r}.")


def adapted(coefficient: float, kl: float, *, target: float, horizon: int, completions: int) -> float:
    """Compute the coefficient of KL for the next batch: it grows while `kl` of this one is over `target`."""
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * completions / horizon)
