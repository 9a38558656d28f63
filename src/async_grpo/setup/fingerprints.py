"""What a run was begun with: its model, its training data in their order, and the versions of packages."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from async_grpo.formatting import counted
from async_grpo.version import __version__

if TYPE_CHECKING:
    from trl import GRPOTrainer

_ROWS = 512  # of a dataset, spread over it
_NOT_COMPARED = ("image", "images")  # decoding them takes seconds


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python and Async-GRPO, and of each package, empty where it is not installed."""
    found = {it: installed(it) or "" for it in packages}
    return {"Python": platform.python_version(), "async-grpo": __version__, **found}


def installed(distribution: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def of_model(model: Any) -> str:
    """`27 tensors, 21,600 numbers, 21,600 of them trained (0123456789ab)`: whether weights and optimizer state fit."""
    parameters = list(model.named_parameters())
    numbers = sum(count(parameter) for _, parameter in parameters)
    trained = sum(count(parameter) for _, parameter in parameters if parameter.requires_grad)
    layout = sorted((name, list(whole_shape(parameter)), parameter.requires_grad) for name, parameter in parameters)
    return f"{counted(len(parameters), 'tensor')}, {numbers:,} numbers, {trained:,} of them trained ({_digest(layout)})"


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Its shape on no rank in particular: DeepSpeed's ZeRO-3 leaves each rank an empty parameter that knows it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def count(parameter: Any) -> int:
    """The numbers in a parameter, over all ranks."""
    return math.prod(whole_shape(parameter))


def of_data(trainer: GRPOTrainer) -> str:
    """`64 rows, seed 42 (0123456789ab)`; empty for data that are streamed, or made by a class of the user's."""
    dataset = trainer.train_dataset
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "select_columns"):
        return ""
    rows, columns = len(dataset), [name for name in dataset.column_names or () if name not in _NOT_COMPARED]
    looked_at = sorted({round(index * (rows - 1) / (_ROWS - 1)) for index in range(_ROWS)}) if rows else []
    found = dataset.with_format(None).select_columns(columns).select(looked_at).to_list()
    shuffled = "" if trainer.shuffle_dataset else ", not shuffled"
    return f"{counted(rows, 'row')}, seed {trainer.args.seed}{shuffled} ({_digest([columns, found])})"


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
