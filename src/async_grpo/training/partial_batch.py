"""The batch that a checkpoint was written in the middle of: `rollout_batch.safetensors`, beside the weights.

TRL trains several optimizer steps on one generation batch when `num_iterations > 1` or `steps_per_generation >
gradient_accumulation_steps`. A checkpoint between them carries the batch as TRL holds it (masked, advantages and
corrections computed, shuffled), so that the resumed run takes the remaining steps on exactly the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_grpo.errors import RunDirError, UnsupportedError
from async_grpo.formatting import counted

FILE_NAME = "rollout_batch.safetensors"


@dataclass(frozen=True, slots=True)
class BatchInUse:
    """A generation batch, cut into the inputs of its `steps_per_generation` forward passes."""

    passes_done: int  # forward passes on it so far, at least one
    inputs: Sequence[dict[str, Any]]  # tensors, or values that JSON can hold


def path_in(checkpoint: Path, rank: int = 0) -> Path:
    """Where a rank of the trainer has its share of the batch."""
    return checkpoint / (FILE_NAME if rank == 0 else f"rollout_batch.rank{rank}.safetensors")


def check_ranks(checkpoint: Path, ranks: int) -> None:
    """Raise `UnsupportedError` unless as many ranks go on with the batch in `checkpoint` as have shares in it."""
    shares = len(list(checkpoint.glob("rollout_batch*.safetensors")))
    if ranks == shares:
        return
    raise UnsupportedError(
        f"{checkpoint} was written in the middle of a generation batch by a trainer of {counted(shares, 'rank')}, and "
        f"this one has {ranks}: each must go on with its own share of that batch. Resume with {shares} (num_processes "
        f"of the accelerate configuration; 1: no --accelerate-config), or move {checkpoint} away to resume from an "
        "older checkpoint."
    )


def save(checkpoint: Path, batch: BatchInUse, rank: int = 0) -> None:
    """Add the batch to a checkpoint. `UnsupportedError` names an input that cannot be saved."""
    tensors: dict[str, torch.Tensor] = {}
    others: list[dict[str, Any]] = []
    for index, inputs in enumerate(batch.inputs):
        kept = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{index}.{name}": value.detach().cpu().clone() for name, value in kept.items()}
        others.append({name: value for name, value in inputs.items() if name not in kept})
    try:
        told = json.dumps({"passes_done": batch.passes_done, "others": others})
    except TypeError as error:
        raise UnsupportedError(
            f"A checkpoint between the steps of one generation batch cannot hold this batch: {error}. Set save_steps "
            "so that checkpoints fall between batches."
        ) from error
    save_file(tensors, path_in(checkpoint, rank), metadata={"batch": told})


def load(checkpoint: Path, device: torch.device, rank: int = 0) -> BatchInUse:
    """The batch that `save` wrote; `RunDirError` if it cannot be read."""
    path = path_in(checkpoint, rank)
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            told = json.loads(file.metadata()["batch"])
            inputs: list[dict[str, Any]] = told["others"]
            for key in file.keys():  # noqa: SIM118 - not a dict
                index, _, name = key.partition(".")
                inputs[int(index)][name] = file.get_tensor(key)
            return BatchInUse(told["passes_done"], inputs)
    except (OSError, SafetensorError, ValueError, TypeError, LookupError) as error:
        raise RunDirError(
            f"{path} cannot be read ({error}). Move {checkpoint} away to resume from an older checkpoint."
        ) from error
