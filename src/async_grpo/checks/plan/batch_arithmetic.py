"""How many steps and rounds a training has, and how much older its rollouts become within a round."""

from __future__ import annotations

import math

from async_grpo.setup.grpo_config.batch import Batch
from async_grpo.training.schedule import Schedule


def optimizer_steps(batch: Batch, *, max_steps: int, epochs: float, epoch_rounds: int | None) -> int | None:
    """Optimizer steps of the whole training; None where only the data's end would tell."""
    if max_steps > 0:
        return max_steps
    if epoch_rounds is None:
        return None
    passes = epoch_rounds * batch.steps_per_generation * batch.num_iterations
    return math.ceil(epochs * max(1, -(-passes // batch.gradient_accumulation_steps)))


def rounds_of(batch: Batch, steps: int) -> int:
    """Generation batches that this many optimizer steps consume."""
    passes = steps * batch.gradient_accumulation_steps
    return -(-passes // (batch.steps_per_generation * batch.num_iterations))


def versions_within_round(batch: Batch) -> int:
    """How much older a rollout is in the last optimizer step on its batch than in the first."""
    plan = Schedule(
        groups_per_round=batch.prompts,
        micro_steps_per_round=batch.steps_per_generation * batch.num_iterations,
        micro_steps_per_version=batch.gradient_accumulation_steps,
        max_staleness=0,
    )
    return plan.versions_within_round
