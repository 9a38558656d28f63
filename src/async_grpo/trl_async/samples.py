"""A finished group as rows that TRL's asynchronous trainer takes: tokens, mask, log-probabilities, advantage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.errors import UnsupportedError
from async_grpo.records import RolloutGroup
from async_grpo.training.rollout_metrics import masks_of

if TYPE_CHECKING:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


def samples_of(group: RolloutGroup) -> Iterator[RolloutSample]:
    """One row a completion, as TRL's own worker makes them of completions without a fork."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    if group.kept_tokens is not None:
        raise UnsupportedError(
            "TRL's asynchronous trainer computes its ratios from the full softmax, and the workers' vLLM its "
            "log-probabilities over the tokens that top_p, top_k or min_p kept. Set top_p=1.0, top_k=0 and min_p=None "
            'in AsyncGRPOConfig, or take WorkerSettings(generator="hf").'
        )
    totals, advantages, spread = advantages_of(group.rewards)
    ends = np.cumsum(group.completion_lengths)[:-1]
    completions, logprobs = np.split(group.completion_ids, ends), np.split(group.sampling_logprobs, ends)
    prompts, masks = _prompts(group), masks_of(group)
    of_group = {name: fmean(values) for name, values in group.metrics.items() if values}
    for index, prompt in enumerate(prompts):
        by_function = zip(group.reward_names, group.rewards[index].tolist(), strict=True)
        yield RolloutSample(
            prompt=_messages(group.prompt(index), "user"),
            completion=_messages(group.completions[index], "assistant"),
            input_ids=np.concatenate([prompt, completions[index]]).astype(np.int64),
            completion_mask=np.array([0] * len(prompt) + masks[index], dtype=np.int64),
            old_log_probs=np.concatenate([np.zeros(len(prompt), np.float32), logprobs[index]]),
            advantage=float(advantages[index]),
            model_version=group.policy_version,
            group_id=group.job.seq,
            metrics={
                "reward": float(totals[index]),
                "reward_std": spread,
                **{f"rewards/{name}": value for name, value in by_function},
                **of_group,
            },
            enqueued_at=time.time(),
        )


def advantages_of(rewards_GF: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """The sum of each completion's rewards [G], its advantage [G], and the standard deviation of the sums.

    As TRL's asynchronous worker: rewards are added without weights, and scaled by the deviation of the group
    (Shao et al., 2024, equation 21). A completion that no function could score has the sum NaN and the advantage 0.
    """
    rewards = rewards_GF.astype(np.float64)
    totals = np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards, axis=1))
    scored = ~np.isnan(totals)
    advantages = np.zeros_like(totals)
    if not scored.any():
        return totals, advantages, float("nan")
    spread = float(totals[scored].std())
    advantages[scored] = (totals[scored] - totals[scored].mean()) / (spread + 1e-8)
    return totals, advantages, spread


def _prompts(group: RolloutGroup) -> list[NDArray[np.int32]]:
    """The tokens of each completion's prompt."""
    if group.prompt_lengths is None:
        return [group.prompt_ids] * len(group.completion_lengths)
    return np.split(group.prompt_ids, np.cumsum(group.prompt_lengths)[:-1])


def _messages(value: Any, role: str) -> Any:
    """TRL shows prompts and completions as messages."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value
