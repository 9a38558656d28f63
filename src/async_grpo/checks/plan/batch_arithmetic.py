"""The arithmetic of TRL's batches: what fits, and what to set where it does not."""

from __future__ import annotations

import math

from async_grpo.checks.plan.facts import BatchFacts


def misfit(batch: BatchFacts) -> str:
    """What is wrong with the numbers, empty if nothing is. The same rules as TRL's own, which stop at the first."""
    if batch.num_generations < 2:
        return (
            f"num_generations={batch.num_generations}: GRPO compares completions of one prompt, so it needs at least 2"
        )
    if batch.generation_batch_size % batch.num_generations:
        return (
            f"a generation batch of {batch.generation_batch_size} completions ({_product(batch)}) is not divisible by "
            f"num_generations={batch.num_generations}: the last prompt's group would be cut"
        )
    return ""


def what_to_set(batch: BatchFacts) -> list[str]:
    """Single changes, each of which makes the numbers fit, the smallest first."""
    if batch.num_generations < 2:
        return [f"num_generations={value}" for value in _divisors(batch.generation_batch_size) if value > 1][:1] or [
            "num_generations=8 and per_device_train_batch_size=8"
        ]
    group = batch.num_generations
    fits = [value for value in _divisors(batch.generation_batch_size) if value > 1]
    nearest = sorted(fits, key=lambda value: (abs(value - group), value))[:2]
    advice = [f"num_generations={value}" for value in nearest]
    others = batch.generation_batch_size // batch.per_device_train_batch_size
    step = group // math.gcd(group, others)
    size = -(-batch.per_device_train_batch_size // step) * step
    advice.append(f"per_device_train_batch_size={size}")
    per_pass = batch.per_device_train_batch_size * batch.processes
    step = group // math.gcd(group, per_pass)
    passes = -(-batch.steps_per_generation // step) * step
    same = batch.steps_per_generation == batch.gradient_accumulation_steps
    advice.append(f"{'gradient_accumulation_steps' if same else 'steps_per_generation'}={passes}")
    return advice


def optimizer_steps(batch: BatchFacts, *, max_steps: int, epochs: float, epoch_rounds: int | None) -> int | None:
    """Optimizer steps of the whole training; None where only the data's end would tell."""
    if max_steps > 0:
        return max_steps
    if epoch_rounds is None:
        return None
    passes = epoch_rounds * batch.steps_per_generation * batch.num_iterations
    return math.ceil(epochs * max(1, -(-passes // batch.gradient_accumulation_steps)))


def rounds_of(batch: BatchFacts, steps: int) -> int:
    """Generation batches that this many optimizer steps consume."""
    passes = steps * batch.gradient_accumulation_steps
    return -(-passes // (batch.steps_per_generation * batch.num_iterations))


def _product(batch: BatchFacts) -> str:
    processes = f" * {batch.processes} processes" if batch.processes > 1 else ""
    return (
        f"per_device_train_batch_size={batch.per_device_train_batch_size}{processes} * "
        f"steps_per_generation={batch.steps_per_generation}"
    )


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]
