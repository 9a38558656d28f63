"""What a function of the user's keeps between calls, as far as it can be seen: attributes, closures, globals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from async_grpo.checks.differential.notes import noted

_MOST_ITEMS = 1000  # of a container that is looked at
_PLAIN = (bool, int, float, str, bytes, type(None), list, tuple, dict, set, frozenset)


def held_state(function: Any) -> dict[str, list[str]]:
    """Its data by name, as notes have values; without what cannot be told apart from call to call."""
    found: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is None and not inspect.isfunction(function):
        owner, function = function, vars(type(function)).get("__call__")
    if owner is not None:
        found |= {f"{type(owner).__name__}.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
    if inspect.isfunction(function):
        found |= {f"{function.__name__}.{name}": value for name, value in vars(function).items()}
        found |= dict(_read_by(function, set()))
    return {name: noted(it) for name, value in found.items() if (it := _data(value)) is not _NOTHING}


_NOTHING = object()


def _read_by(function: Any, seen: set[Any]) -> Iterator[tuple[str, Any]]:
    """The variables outside of the function that it reads, and that functions of its module read which it calls."""
    if function in seen:
        return
    seen.add(function)
    code, outside = function.__code__, function.__globals__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    read = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
    read |= {name: outside[name] for name in _names(code) if name in outside}
    for name, value in read.items():
        if inspect.isfunction(value) and value.__globals__ is outside:
            yield from _read_by(value, seen)
        else:
            yield name, value


def _names(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _data(value: Any) -> Any:
    """What of a value can be noted; `_NOTHING` where that would say nothing, or would be too much."""
    if isinstance(value, _PLAIN):
        too_much = isinstance(value, (list, tuple, dict, set, frozenset, str, bytes)) and len(value) > _MOST_ITEMS
        return _NOTHING if too_much else value
    if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
        return _NOTHING
    if (step := getattr(getattr(value, "state", None), "global_step", None)) is not None:  # a trainer
        return {"state.global_step": step}
    if type(value).__module__ in ("itertools", "collections", "random"):
        return repr(value)
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, Mapping):
        return _NOTHING
    return {name: it for name, it in attributes.items() if isinstance(it, _PLAIN) and _data(it) is not _NOTHING}
