"""Reads `delta_{step:06d}.pt`, the files that this format replaces. They were written by `torch.save`.

A file holds `step` and `layers`: by name, `indices` (int32, one row a dimension), `values`, and `shape`. With
`"format": "values"` the values are those of the new version; without it they are differences that were rounded to
bf16, so what is rebuilt of them is close to the new version, and not equal. No hash says which weights they start from.

This is the only place that opens a pickle, and only with `weights_only=True`: torch then builds tensors and plain
containers, and refuses everything else.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.errors import BadFileError, DeltaChainError
from async_grpo.rundir.reading import naming, open_plain

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"delta_(\d{6,})\.pt")


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """What became of one tensor."""

    indices: Tensor  # [dimensions, changed]
    values: Tensor  # [changed]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OriginalDelta:
    """One file."""

    step: int
    changes: dict[str, RecordedChange]
    is_exact: bool  # whether it holds new values, not rounded differences

    @property
    def changed(self) -> int:
        return sum(int(change.values.numel()) for change in self.changes.values())


def original_files(folder: Path) -> dict[int, Path]:
    """By step, the files of the original in `folder`."""
    found = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir()) if folder.is_dir() else ()
    return dict(sorted((int(match[1]), path) for path, match in found if match))


def read_original(path: Path) -> OriginalDelta:
    """`BadFileError` where it is damaged, is not what its name says, or holds anything but tensors and plain values."""
    import torch

    with naming(path):
        with os.fdopen(open_plain(path), "rb") as file:
            try:
                found = torch.load(file, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
                raise BadFileError(f"torch refuses it: {str(error).splitlines()[0]}") from error
        try:
            delta = _delta(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadFileError(f"it is no delta of the original ({error!r})") from error
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[1]) != delta.step:
            raise BadFileError(f"it holds step {delta.step}: it was renamed or swapped")
    return delta


def apply_original(delta: OriginalDelta, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors; `base` is not written to. `DeltaChainError` names a tensor that does not fit."""
    import torch

    new = {name: tensor.clone() for name, tensor in base.items()}
    for name, change in delta.changes.items():
        tensor = new.get(name)
        if tensor is None or tuple(tensor.shape) != change.shape:
            has = "is not there" if tensor is None else f"has the shape {list(tensor.shape)}"
            raise DeltaChainError(
                f"Step {delta.step} changes {name} {list(change.shape)}, which {has} in the weights that it was given."
            )
        where = tuple(change.indices.long())
        rows = zip(change.indices, change.shape, strict=True) if change.values.numel() else ()
        if any(int(row.min()) < 0 or int(row.max()) >= length for row, length in rows):
            raise DeltaChainError(f"Step {delta.step} changes elements of {name} that it does not have.")
        if delta.is_exact:
            tensor[where] = change.values.to(tensor.dtype)
        else:
            tensor[where] = (tensor[where].to(torch.float32) + change.values.to(torch.float32)).to(tensor.dtype)
    return new


def _delta(found: Any) -> OriginalDelta:
    about = {**found.get("metadata", {}), **found}
    changes = {str(name): _change(layer) for name, layer in found["layers"].items()}
    return OriginalDelta(int(found["step"]), changes, about.get("format") == "values")


def _change(layer: Mapping[str, Any]) -> RecordedChange:
    change = RecordedChange(
        layer["indices"], layer["values"].reshape(-1), tuple(int(length) for length in layer["shape"])
    )
    if change.indices.is_floating_point() or change.indices.shape != (len(change.shape), change.values.numel()):
        raise ValueError(f"indices {list(change.indices.shape)} for {change.values.numel()} values")
    return change


def _refuse_hole(folder: Path, steps: Sequence[int], step: int) -> None:
    """The original only logged that a file could not be written, and no hash shows that one is missing."""
    apart = min((later - earlier for earlier, later in pairwise(steps)), default=1)
    missing = [number for number in range(steps[0], step, apart) if number not in steps]
    if missing:
        raise DeltaChainError(
            f"{folder} has no delta of step {missing[0]}, and those after it start from it: step {step} would lack its "
            f"changes. The last step before it can be rebuilt, or give a checkpoint of step {missing[0]} or later as "
            "--base, with the files after it in a folder of their own."
        )


def rebuild_original(folder: Path, step: int, base: Path, output: Path) -> bool:
    """Write the weights of `step` into a new folder, as a copy of the checkpoint `base` with other weights.

    Returns whether they are exact, as far as `base` is what the first file starts from.

    Raises:
        BadFileError: a file cannot be used.
        DeltaChainError: `step` or one before it is not there, `base` is of another model, or `output` exists.
    """
    from safetensors.torch import load_file, save_file

    files = original_files(folder)
    if step not in files:
        raise DeltaChainError(f"{folder} has no delta of step {step}; it has {min(files)} to {max(files)}.")
    if output.exists():
        raise DeltaChainError(f"{output} exists already. Name a folder that does not.")
    if not (base / "model.safetensors").is_file():
        raise DeltaChainError(f"{base} has no model.safetensors, in which the weights of --base are expected.")
    needed = {number: path for number, path in files.items() if number <= step}
    _refuse_hole(folder, list(needed), step)
    weights = load_file(base / "model.safetensors")
    is_exact = True
    for path in needed.values():
        delta = read_original(path)
        weights, is_exact = apply_original(delta, weights), is_exact and delta.is_exact
    shutil.copytree(base, output)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    return is_exact
