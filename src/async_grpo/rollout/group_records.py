"""Turns what TRL generated and scored into the record that goes back to the trainer."""

from __future__ import annotations

from itertools import chain

import numpy as np

from async_grpo.records import Job, RolloutGroup, Timings
from async_grpo.rollout.trl_hooks import GeneratedGroup, Scores


def to_record(
    job: Job,
    generated: GeneratedGroup,
    scores: Scores,
    *,
    attempt: int,
    worker: str,
    policy_version: int,
    token_versions: list[list[int]] | None = None,
    reward_names: list[str],
    timings: Timings,
) -> RolloutGroup:
    """The finished group. Token ids as int32, log-probabilities as float32, all completions back to back."""
    masks = generated.tool_masks
    return RolloutGroup(
        job=job,
        attempt=attempt,
        worker=worker,
        policy_version=policy_version,
        reward_names=tuple(reward_names),
        prompt_ids=np.asarray(generated.prompt_ids[0], dtype=np.int32),
        completion_lengths=np.asarray([len(ids) for ids in generated.completion_ids], dtype=np.int32),
        completion_ids=_flat(generated.completion_ids, np.int32),
        sampling_logprobs=_flat(generated.logprobs, np.float32),
        tool_mask=_flat(masks, np.uint8) if masks is not None else None,
        token_versions=_flat(token_versions, np.int32) if token_versions is not None else None,
        rewards=scores.rewards.numpy().astype(np.float32),
        completions=generated.completions,
        metrics={**generated.metrics, **scores.metrics},
        extra_columns=scores.extra_columns,
        timings=timings,
    )


def _flat(rows: list[list[int]] | list[list[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=dtype)
