"""`--train-of-group m`: of the n completions of a group, those m are trained on whose rewards differ most.

With the rewards of a group sorted, the m of largest variance are the i lowest and the m - i highest, for one i from 0
to m (max-variance down-sampling of PODS, arXiv 2504.13818). Advantages are those of all n. Within a group they are the
rewards, shifted and scaled, so the same completions have the largest variance of advantages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.replaced import users_class
from async_grpo.tasks.gradients import rows_of
from async_grpo.training.corrections.trl_loss import has_own_loss
from async_grpo.training.corrections.weights import loss_mask

_EQUAL = 1 - 1e-5  # variances that only float32 sets apart are equal: then the fewest of the lowest are taken


def most_different(values: Tensor, count: int) -> Tensor:
    """Return which `count` values of each row have the largest variance: indices, [rows, count], ascending.

    Args:
        values: [rows, n], n > count. Of equal ones the first is the lower.
    """
    order = values.double().cpu().sort(dim=1, stable=True)
    places, gap = torch.arange(count, device="cpu"), values.shape[1] - count
    candidates = torch.stack([torch.where(places < lowest, places, places + gap) for lowest in range(count + 1)])
    variances = order.values[:, candidates].var(-1, correction=0)  # [rows, count + 1]
    best = (variances >= variances.amax(1, keepdim=True) * _EQUAL).int().argmax(1)
    return order.indices.gather(1, candidates[best]).sort(dim=1).values


def part_of_groups(trainer: Any, batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return `trainer.train_of_group` completions of each group of a generation batch, which TRL made of `rows`."""
    from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

    advantages, n = batch["advantages"], trainer.num_generations
    if advantages.shape != (rows,):
        raise UnsupportedError(
            f"--train-of-group needs one advantage for each of {rows} completions, and {users_class(trainer)} gave "
            f"advantages of shape {list(advantages.shape)}. Leave the option out."
        )
    chosen = most_different(advantages.view(-1, n), trainer.train_of_group)
    kept = (torch.arange(0, rows, n, device="cpu")[:, None] + chosen).flatten().to(advantages.device)
    part: dict[str, Any] = unsplit_pixel_values_by_grid(rows_of(split_pixel_values_by_grid(batch), kept))
    part["num_items_in_batch"] = trainer.accelerator.gather(loss_mask(part).sum()).sum()  # what TRL divides by
    return part


def refuse_part(trainer: Any, count: int) -> None:
    """Raise `UnsupportedError` where advantages or loss are not TRL's, `UsageError` for a number that does not fit."""
    option = f"--train-of-group {count}"
    if isinstance(trainer, Algorithm) or has_own_loss(trainer):
        raise UnsupportedError(
            f"{option} chooses completions by TRL's advantages for TRL's loss, and {users_class(trainer)} has its own, "
            "which may need whole groups. Leave the option out."
        )
    n, batch = trainer.num_generations, trainer.args.per_device_train_batch_size
    fitting = [number for number in range(2, n) if batch * number % n == 0]
    if count not in fitting:
        sizes = ", ".join(map(str, fitting)) or f"none; make per_device_train_batch_size a multiple of {n}"
        raise UsageError(
            f"{option}: of num_generations={n} it must leave 2 or more, less than all, and a whole number of "
            f"completions of each forward pass of {batch}. What fits: {sizes}."
        )
    if (own := batch * trainer.args.steps_per_generation) % n:
        raise UsageError(
            f"{option}: each process has {own} completions of a generation batch, which are not whole groups of {n}. "
            f"Make per_device_train_batch_size x steps_per_generation a multiple of {n}, or leave the option out."
        )
