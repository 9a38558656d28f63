"""Finished groups with fields changed in type, length and nesting, as far as a file of the queue can hold them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import Any

import numpy as np

from async_grpo.errors import AsyncGRPOError
from async_grpo.queue.codec import encode_group
from async_grpo.records import RolloutGroup

LEAVES: list[Any] = [
    *(None, True, 0, -1, 1 << 62, 1e300, "", "text", "a\ud800", "x" * 100_000, [], {}, [None], [[[["a"]]]]),
    *({"role": 1}, {"type": "image"}, [{"type": "text"}], [{"role": "tool", "content": [{"type": 1}]}]),
]
NUMBERS = [0, 1, -1, 2**31 - 1, -(2**31), 0.5, -1e30, 1e30, float("nan"), float("inf"), -float("inf")]
KEPT = {"job", "attempt", "worker"}  # by which the queue knows whose it is
TRIES = 50


def changed(group: RolloutGroup, random: Random) -> RolloutGroup:
    """A group that differs in one to three fields, and that can be written."""
    for _ in range(TRIES):
        names = random.sample([field.name for field in fields(group) if field.name not in KEPT], random.randint(1, 3))
        with_changes = replace(group, **{name: _changed(getattr(group, name), random) for name in names})
        if random.random() < 0.2:
            with_changes = replace(with_changes, job=replace(group.job, row=_changed(dict(group.job.row), random)))
        if _can_be_written(with_changes):
            return with_changes
    return group


def _can_be_written(group: RolloutGroup) -> bool:
    try:
        encode_group(group)
    except (AsyncGRPOError, TypeError, ValueError, AttributeError):
        return False
    return True


def _changed(value: Any, random: Random) -> Any:
    if isinstance(value, np.ndarray):
        return random.choice(ARRAYS)(value, random)
    if isinstance(value, (list, dict)) and value:
        return _inside(copy.deepcopy(value), random)
    if isinstance(value, (int, float)):
        return random.choice(NUMBERS)
    return random.choice(LEAVES)


def _inside(value: Any, random: Random) -> Any:
    """One value at any depth replaced, taken out or repeated."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = random.choice(keys)
    if isinstance(value[key], (list, dict)) and value[key] and random.random() < 0.7:
        value[key] = _inside(value[key], random)
    elif random.random() < 0.1:
        del value[key]
    elif random.random() < 0.1 and isinstance(value, list):
        value.append(value[key])
    else:
        value[key] = random.choice(LEAVES)
    return value


def _filled(array: np.ndarray, random: Random) -> np.ndarray:
    return np.full_like(array, _fitting(array, random))


def _one(array: np.ndarray, random: Random) -> np.ndarray:
    array = array.copy()
    if array.size:
        array.flat[random.randrange(array.size)] = _fitting(array, random)
    return array


def _fitting(array: np.ndarray, random: Random) -> Any:
    if array.dtype.kind == "f":
        return random.choice(NUMBERS)
    limits = np.iinfo(array.dtype)
    return random.choice([limits.min, limits.max, 0, 1, random.randint(0, 200)])


ARRAYS: list[Callable[[np.ndarray, Random], np.ndarray | None]] = [
    _filled,
    _one,
    _one,
    lambda array, random: array[: random.randint(0, len(array))],
    lambda array, random: np.concatenate([array, array]),
    lambda array, random: array[::-1].copy(),
    lambda array, random: array.astype(np.float64),
    lambda array, random: array.reshape(-1, 1),
    lambda array, random: None,
]
