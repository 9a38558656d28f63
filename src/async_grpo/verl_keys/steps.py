"""The arithmetic of verl's batches in TRL's terms.

verl counts prompts: a step is a generation batch of `train_batch_size` of them, with n completions each, and an update
is `ppo_mini_batch_size` of them. TRL counts completions, and a step is an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from async_grpo.errors import UsageError
from async_grpo.formatting import counted
from async_grpo.verl_keys.keys import ACTOR, ROLLOUT, Keys

_MICRO = 8  # completions of a micro-batch where nothing is said of it, at most


@dataclass(frozen=True, slots=True)
class Steps:
    """A generation batch and its updates."""

    prompts: int  # of a generation batch
    completions: int  # of each prompt
    mini: int  # completions of an update, of all ranks
    micro: int  # completions of a pass on one rank
    ranks: int
    epochs: int  # passes over a generation batch

    @classmethod
    def of(cls, keys: Keys, ranks: int) -> Steps:
        """Raises `UsageError` for sizes that do not divide each other, with the nearest that do."""
        prompts, n = keys["data.train_batch_size"], keys[f"{ROLLOUT}.n"]
        size = f"{ACTOR}.ppo_mini_batch_size"
        mini = keys[size]
        if prompts % mini:
            raise UsageError(
                f"data.train_batch_size={prompts} is not divisible by {size}={mini}. Nearest: "
                f"data.train_batch_size={_or(_multiples(prompts, mini))}, or {size}={_or(_divisors(prompts, mini))}."
            )
        if mini * n % ranks:
            step = ranks // gcd(ranks, n)
            raise UsageError(
                f"{size}={mini} × {ROLLOUT}.n={n} completions cannot be shared by {ranks} GPUs that train. Nearest: "
                f"{size}={_or(_multiples(mini, step))}, with data.train_batch_size a multiple of it."
            )
        own = mini * n // ranks
        micro = keys[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
        if micro is None:
            micro = max(size for size in range(1, min(own, _MICRO) + 1) if own % size == 0)
        elif own % micro:
            raise UsageError(
                f"A mini-batch has {own} completions a GPU ({size}={mini} × {ROLLOUT}.n={n} / {ranks}), which "
                f"{ACTOR}.ppo_micro_batch_size_per_gpu={micro} does not divide. Nearest: {_or(_divisors(own, micro))}."
            )
        return cls(prompts, n, mini * n, micro, ranks, keys[f"{ACTOR}.ppo_epochs"])

    @property
    def updates(self) -> int:
        """Optimizer steps of one step of verl."""
        return self.prompts * self.completions // self.mini * self.epochs

    def fields(self) -> dict[str, int]:
        """Fields of the `GRPOConfig`."""
        accumulated = self.mini // (self.micro * self.ranks)
        return {
            "per_device_train_batch_size": self.micro,
            "gradient_accumulation_steps": accumulated,
            "steps_per_generation": accumulated * (self.prompts * self.completions // self.mini),
        }

    def both(self, steps: int) -> str:
        """Steps of verl, in words, with what they are here."""
        return f"{counted(steps, 'step')} of verl = {counted(steps * self.updates, 'optimizer step')}"


def total_steps(keys: Keys, rows: int) -> tuple[int, str]:
    """How many steps of verl the run has, and where that comes from. `UsageError`: the rows do not make one batch."""
    size, epochs = keys["data.train_batch_size"], keys["trainer.total_epochs"]
    if rows < size:
        raise UsageError(f"data.train_batch_size={size}, and the files have {rows:,} rows. Take at most {rows:,}.")
    batches = rows // size
    if (fixed := keys["trainer.total_training_steps"]) is not None:
        return fixed, f"trainer.total_training_steps; an epoch has {batches:,}"
    return epochs * batches, f"{epochs} epochs of {batches:,} batches"


def _multiples(near: int, of: int) -> list[int]:
    return [size for size in (near // of * of, near // of * of + of) if size]


def _divisors(of: int, near: int) -> list[int]:
    sizes = [size for size in range(1, of + 1) if of % size == 0]
    return [*[size for size in sizes if size < near][-1:], *[size for size in sizes if size > near][:1]]


def _or(sizes: list[int]) -> str:
    return " or ".join(map(str, sizes))
