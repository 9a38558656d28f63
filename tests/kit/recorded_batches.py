"""The completions of a run of ours, for TRL to train on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from trl import GRPOTrainer

from async_grpo.records import RolloutGroup


def replaying(recorded: Iterator[list[RolloutGroup]]) -> Callable[[list[Any], GRPOTrainer], dict[str, Any]]:
    """A `rollout_func` that gives TRL the recorded completions."""

    def rollout_func(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        groups = next(recorded)
        assert prompts == [group.job.row["prompt"] for group in groups for _ in range(group.job.num_generations)]
        tokens, logprobs = completions_of(groups)
        return {"prompt_ids": prompts_of(groups), "completion_ids": tokens, "logprobs": logprobs}

    return rollout_func


def replay_with_trl(
    get_trainer: Callable[..., GRPOTrainer], batches: list[list[RolloutGroup]], own_rollouts: bool = False
) -> GRPOTrainer:
    """Train with plain TRL in one process on recorded completions, given to it by its public `rollout_func`.

    The prompts, their order and the rewards are TRL's own; that the prompts are the recorded ones is checked.
    own_rollouts: the trainer's own `rollout_func` makes the same again.
    """
    recorded = iter(() if own_rollouts else batches)
    trainer = get_trainer(arguments={} if own_rollouts else {"rollout_func": replaying(recorded)})
    trainer.train()
    assert next(recorded, None) is None, "TRL used fewer batches than the asynchronous run"
    return trainer


class Recorded(GRPOTrainer):
    """Plain TRL, with recorded completions in place of sampling: its own prompts, images and rewards."""

    batches: Any

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        groups: list[RolloutGroup] = next(self.batches)
        assert [list(ids) for ids in prompt_ids] == prompts_of(groups)
        return completions_of(groups)


def prompts_of(groups: list[RolloutGroup]) -> list[list[int]]:
    """The prompt of each completion."""
    return [group.prompt_ids.tolist() for group in groups for _ in range(group.job.num_generations)]


def completions_of(groups: list[RolloutGroup]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probabilities."""
    ends = [np.cumsum(group.completion_lengths)[:-1] for group in groups]
    tokens, logprobs = (
        [part.tolist() for group, at in zip(groups, ends, strict=True) for part in np.split(getattr(group, name), at)]
        for name in ("completion_ids", "sampling_logprobs")
    )
    return tokens, logprobs
