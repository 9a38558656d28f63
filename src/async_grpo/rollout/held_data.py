"""What is wrong with reward functions and shows only in their calls.

They keep data between calls, of which each worker has a copy where TRL has one; or they never give a number: training
goes to its end with them, and nothing is learnt from them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from threading import Lock
from types import CellType, CodeType
from typing import Any

import numpy as np
import torch
from transformers import Trainer

from async_grpo.log import logger
from async_grpo.records import distinct
from async_grpo.rollout.failures import is_users_code

PATIENCE = 4  # groups: a function may be for some rows only, and give None for all others
FIRST_CALLS = 8  # of a worker, that are looked at
_MOST_ITEMS = 1000  # of a container that is looked at
_MOST_INSIDE = 31  # of a container in one
_MOST_BYTES = 1 << 16  # of an array or tensor
_CONTAINERS = (list, tuple, dict, set, frozenset)
_PLAIN = (bool, int, float, str, bytes, type(None), *_CONTAINERS)
_NOTHING = object()


class HeldData:
    """Warns once of each reward function that changes what it keeps, in the first calls of a worker."""

    def __init__(self) -> None:
        self.calls_left = FIRST_CALLS
        self._told: set[int] = set()  # indices of functions

    @contextmanager
    def around(self, trainer: Any) -> Iterator[None]:
        """The trainer calls its reward functions in this block."""
        self.calls_left -= 1
        functions = trainer.reward_funcs
        watched = [at for at, it in enumerate(functions) if at not in self._told and not hasattr(it, "forward")]
        before = [_copies(functions[index]) for index in watched]
        yield
        for index, held in zip(watched, before, strict=True):
            now = _copies(functions[index])
            if changed := sorted(name for name in held.keys() & now if not _goes_on(held[name], now[name])):
                self._told.add(index)
                logger.warning(
                    "the reward function {} changes {} when it is called: each worker has its own, and TRL has one, so "
                    "its rewards may depend on the number of workers. Compute them from what the function is given. "
                    "`async-grpo check` compares them with TRL's",
                    distinct(trainer.reward_func_names)[index],
                    ", ".join(changed),
                )


def _goes_on(before: Any, now: Any) -> bool:
    """Whether everything that was there is there: nothing has changed, or a cache has been filled."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(name in now and _goes_on(value, now[name]) for name, value in before.items())
    return before is None or now is _NOTHING or before is now or before == now


def _copies(function: Any) -> dict[str, Any]:
    """What a function keeps now; nothing where code of the user's that this meets, such as a `__hash__`, raises."""
    try:
        return {name: _copied(value, _MOST_ITEMS) for name, value in held_by(function).items()}
    except Exception:  # noqa: BLE001  # whatever it is: it must not cost the group its rewards
        return {}


def _copied(value: Any, most: int) -> Any:
    """A value as it is now, to be compared: nothing of a large container, of other objects which one it is."""
    if isinstance(value, _CONTAINERS) and len(value) > most:
        return _NOTHING
    if isinstance(value, dict):
        return {name: _copied(it, _MOST_INSIDE) for name, it in {**value}.items()}
    if isinstance(value, _CONTAINERS):
        return type(value), [_copied(it, _MOST_INSIDE) for it in [*value]]
    if isinstance(value, _PLAIN):
        return value
    return str(value.tolist()) if _is_small_array(value) else id(value)


def _is_small_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic, torch.Tensor)) and value.nbytes <= _MOST_BYTES


def held_by(function: Any) -> dict[str, Any]:
    """A function's data by name: attributes, closures, globals that it reads, values of arguments by default.

    Without what cannot be told apart from call to call.
    """
    found: dict[str, Any] = {}
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        given, function = {**function.keywords, **given}, function.func
    owner = getattr(function, "__self__", None)
    if owner is None and not inspect.isfunction(function):
        owner, function = function, vars(type(function)).get("__call__")
    if owner is not None:
        found |= {f"{type(owner).__name__}.{name}": value for name, value in _attributes(owner).items()}
    function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
    if inspect.isfunction(function):
        found |= {f"{function.__name__}.{name}": value for name, value in vars(function).items()}
        found |= {name: it.default for name, it in inspect.signature(function).parameters.items()}
        found |= dict(_read_by(function, set()))
    return {name: it for name, value in {**found, **given}.items() if (it := _data(value)) is not _NOTHING}


def _read_by(function: Any, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    """The variables outside of the function that it reads, and that functions of its module read which it calls."""
    if function in seen:
        return
    seen.add(function)
    code, outside = function.__code__, function.__globals__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    read = {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    read |= {name: outside[name] for name in _names(code) if name in outside}
    for name, value in read.items():
        if inspect.isfunction(value) and value.__globals__ is outside:
            yield from _read_by(value, seen)
        else:
            yield name, value


def _names(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _data(value: Any) -> Any:
    """The part of a value that can be noted; `_NOTHING` where that would say nothing, or would be too much."""
    if isinstance(value, _PLAIN):
        return _NOTHING if isinstance(value, Sized) and len(value) > _MOST_ITEMS else value
    if _is_small_array(value):
        return value
    if inspect.isroutine(value) or inspect.ismodule(value):
        return _NOTHING
    if isinstance(value, Trainer):
        return {"state.global_step": value.state.global_step}
    if type(value).__module__ in ("itertools", "collections", "random"):
        return repr(value)
    found = {name: it for name, it in _attributes(value).items() if isinstance(it, _PLAIN)}
    return {name: it for name, it in found.items() if _data(it) is not _NOTHING} if found else _NOTHING


def _attributes(value: Any) -> dict[str, Any]:
    """What is set in an object and in its class, or in a class, of the user's code."""
    kind = value if inspect.isclass(value) else type(value)
    module = sys.modules.get(kind.__module__)
    if kind.__module__ != "types" and not is_users_code(getattr(module, "__file__", None) or ""):
        return {}
    of_class = {name: it for name, it in vars(kind).items() if not name.startswith("__")}
    slots = {name: getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)}
    return of_class if kind is value else {**of_class, **slots, **getattr(value, "__dict__", {})}


class Numberless:
    """Warns once of each reward function that has given only NaN or None so far, from any thread."""

    def __init__(self) -> None:
        self.looks = True  # there is a function that has not settled yet
        self._settled: set[int] = set()  # indices of functions that gave a number, or were warned of
        self._completions: Counter[int] = Counter()  # of those that did not
        self._groups = 0
        self._lock = Lock()

    def saw(self, names: Sequence[str], rewards: torch.Tensor, groups: int) -> None:
        """One call of the reward functions gave `rewards`, [completions, F], for so many groups."""
        silent = torch.isnan(rewards).all(dim=0).tolist()
        with self._lock:
            self._groups += groups
            self._settled |= {index for index, is_silent in enumerate(silent) if not is_silent}
            for index in [index for index in range(len(names)) if index not in self._settled]:
                self._completions[index] += len(rewards)
                if len(names) == 1 or self._groups >= PATIENCE:
                    self._warn(index, distinct(names)[index], alone=len(names) == 1)
            self.looks = len(self._settled) < len(names)

    def _warn(self, index: int, name: str, *, alone: bool) -> None:
        self._settled.add(index)
        logger.warning(
            "the reward function {} gave no number, only NaN or None, for any of {} completions so far: {}. Let it "
            "return a number for each completion",
            name,
            self._completions[index],
            "they have no reward at all, and nothing is learnt from them" if alone else "it has no part in the reward",
        )
