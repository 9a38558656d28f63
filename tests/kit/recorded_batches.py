"""The completions of a run of ours, for TRL to train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trl import GRPOTrainer

from async_grpo.records import RolloutGroup


def replaying(recorded: Iterator[list[RolloutGroup]]) -> Callable[[list[Any], GRPOTrainer], dict[str, Any]]:
    """A `rollout_func` that gives TRL the recorded completions."""

    def rollout_func(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        groups = next(recorded)
        assert prompts == [group.job.row["prompt"] for group in groups for _ in range(group.job.num_generations)]
        output: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for group in groups:
            start = 0
            for size in group.completion_lengths.tolist():
                output["prompt_ids"].append(group.prompt_ids.tolist())
                output["completion_ids"].append(group.completion_ids[start : start + size].tolist())
                output["logprobs"].append(group.sampling_logprobs[start : start + size].tolist())
                start += size
        return output

    return rollout_func
