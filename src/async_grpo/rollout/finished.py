"""A group as TRL has made it, its scores, and the record of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import BadGroupError
from async_grpo.images import encoded
from async_grpo.records import RolloutGroup, Timings
from async_grpo.rollout.prompts import prompt_of

if TYPE_CHECKING:
    import torch

    from async_grpo.records import Job


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GeneratedGroup:
    """The G completions of one prompt group, not scored yet, as TRL made them."""

    job: Job
    version: int  # policy version that sampled the tokens; the oldest, where `token_versions` has more
    rows: list[dict[str, Any]]  # [G], the group's dataset row, once per completion
    prompts: list[Any]  # [G]
    completions: list[Any]  # [G], text or messages
    prompt_ids: list[list[int]]  # [G]
    completion_ids: list[list[int]]  # [G]
    logprobs: list[list[float]]  # [G]
    token_versions: list[list[int]] | None  # [G], where weights change while a group is sampled
    tool_masks: list[list[int]] | None  # [G]
    environments: list[Any] | None  # [G]
    state: Any  # what reward functions see as `trainer_state`: the trainer's when it issued the job
    metrics: dict[str, list[float]]  # what TRL counted while generating: tool calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the reward functions returned for one group."""

    rewards: torch.Tensor  # [G, F], NaN for None
    metrics: dict[str, list[float]]  # `log_metric`
    extra_columns: dict[str, list[Any]]  # `log_extra`
    turn_rewards: list[list[float]] | None = None  # [G], one a turn, NaN for none


def to_record(
    group: GeneratedGroup, scores: Scores, *, attempt: int, worker: str, reward_names: Sequence[str], timings: Timings
) -> RolloutGroup:
    """The finished group. Token ids as int32, log-probabilities as float32, all completions back to back.

    Raises:
        BadGroupError: tokens, log-probabilities or rewards are no numbers.
    """
    try:
        prompt_ids = [np.asarray(ids, dtype=np.int32) for ids in group.prompt_ids]
        one_prompt = all(np.array_equal(ids, prompt_ids[0]) for ids in prompt_ids[1:])
        return RolloutGroup(
            job=group.job,
            attempt=attempt,
            worker=worker,
            policy_version=group.version,
            reward_names=tuple(reward_names),
            prompt_ids=prompt_ids[0] if one_prompt else np.concatenate(prompt_ids),
            prompt_lengths=None if one_prompt else _lengths(prompt_ids),
            completion_lengths=_lengths(group.completion_ids),
            completion_ids=_flat(group.completion_ids, np.int32),
            sampling_logprobs=_flat(group.logprobs, np.float32),
            tool_mask=_flat(group.tool_masks, np.uint8) if group.tool_masks is not None else None,
            token_versions=_flat(group.token_versions, np.int32) if group.token_versions is not None else None,
            turn_counts=_lengths(scores.turn_rewards) if scores.turn_rewards is not None else None,
            turn_rewards=_flat(scores.turn_rewards, np.float32) if scores.turn_rewards is not None else None,
            rewards=scores.rewards.numpy().astype(np.float32),
            completions=encoded(group.completions),
            metrics={**group.metrics, **scores.metrics},
            extra_columns=encoded(scores.extra_columns),
            prompts=encoded(_prompts_to_store(group)),
            timings=timings,
        )
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # of a `rollout_func`, a reward or a tool
        raise BadGroupError(f"Group {group.job.seq} cannot be written: {error}") from error


def _prompts_to_store(group: GeneratedGroup) -> list[Any]:
    """As `RolloutGroup.prompts` has them: none where they are the row's own, one where all are equal."""
    first = group.prompts[0]
    if any(prompt != first for prompt in group.prompts):
        return group.prompts
    row = group.rows[0]
    return [] if "prompt" in row and first == prompt_of(row) else [first]


def _lengths(rows: Sequence[Any]) -> np.ndarray:
    return np.asarray([len(row) for row in rows], dtype=np.int32)


def _flat(rows: list[list[int]] | list[list[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=dtype)
