"""The arithmetic of TRL's batches: what fits, and what to set where it does not."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Any

from async_grpo.errors import SetupFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The numbers that must fit each other; all of them are counted in completions, but for the steps."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    generation_batch_size: int
    num_generations: int
    num_iterations: int = 1
    processes: int = 1
    machines: int = 1

    @classmethod
    def of(cls, config: Any) -> Batch | None:
        """The numbers of a `GRPOConfig`; None where it was refused before these numbers were set."""
        if not (config.steps_per_generation and config.generation_batch_size):
            return None
        same = {entry.name: getattr(config, entry.name) for entry in fields(cls) if hasattr(config, entry.name)}
        ranks = config.world_size
        return cls(**same, processes=ranks, machines=max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))

    @property
    def prompts(self) -> int:
        """Prompts of one round."""
        return self.generation_batch_size // self.num_generations

    @property
    def passes(self) -> int:
        """Forward and backward passes over one round."""
        return self.steps_per_generation * self.num_iterations


class BatchError(SetupFileError, ValueError):
    """The numbers of a `GRPOConfig` do not fit each other; as `ValueError` it is what TRL raises."""

    def __init__(self, batch: Batch) -> None:
        possible = ", ".join(map(str, possible_generations(batch))) or "none"
        super().__init__(
            f"{misfit(batch)}. Set one of: {'; '.join(what_to_set(batch))}. With these batch sizes num_generations can "
            f"be: {possible}."
        )
        self.batch = batch


def misfit(batch: Batch) -> str:
    """What is wrong with the numbers, empty if nothing is. The same rules as TRL's own, which stop at the first."""
    if batch.num_generations < 2:
        return (
            f"num_generations={batch.num_generations}: GRPO compares completions of one prompt, so it needs at least 2"
        )
    if batch.generation_batch_size % batch.num_generations:
        processes = f" * {batch.processes} processes" if batch.processes > 1 else ""
        return (
            f"a generation batch of {batch.generation_batch_size} completions (per_device_train_batch_size="
            f"{batch.per_device_train_batch_size}{processes} * steps_per_generation={batch.steps_per_generation}) is "
            f"not divisible by num_generations={batch.num_generations}: the last prompt's group would be cut"
        )
    return ""


def what_to_set(batch: Batch) -> list[str]:
    """Single changes, each of which makes the numbers fit, the smallest first."""
    if batch.num_generations < 2:
        return [f"num_generations={value}" for value in possible_generations(batch)][:1] or [
            "num_generations=8 and per_device_train_batch_size=8"
        ]
    group = batch.num_generations
    nearest = sorted(possible_generations(batch), key=lambda value: (abs(value - group), value))[:2]
    advice = [f"num_generations={value}" for value in nearest]

    def whole(value: int, each: int) -> int:
        step = group // math.gcd(group, each)
        return -(-value // step) * step

    each = batch.per_device_train_batch_size
    passes = whole(batch.steps_per_generation, each * batch.processes)
    same = batch.steps_per_generation == batch.gradient_accumulation_steps
    advice.append(f"per_device_train_batch_size={whole(each, batch.generation_batch_size // each)}")
    advice.append(f"{'gradient_accumulation_steps' if same else 'steps_per_generation'}={passes}")
    step = math.lcm(group // math.gcd(group, each * batch.steps_per_generation), batch.machines)  # as many on each
    fewer = batch.processes // step * step  # as of machines that are left
    advice += [f"num_processes={count}" for count in (fewer, fewer + step) if count and batch.processes > 1]
    return advice


def possible_generations(batch: Batch) -> list[int]:
    """Each `num_generations` that divides a generation batch into whole groups, the smallest first."""
    return [value for value in range(2, batch.generation_batch_size + 1) if batch.generation_batch_size % value == 0]
