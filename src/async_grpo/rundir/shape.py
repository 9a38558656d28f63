"""The shape of JSON values that come from a file: a dataclass or a named tuple declares it, here it is checked."""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from async_grpo.errors import BadFileError
from async_grpo.rundir.reading import LineReader, bad, parse_object, read_object

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_INTEGERS = range(-(1 << 63), 1 << 63)  # what torch, numpy and other languages hold; a range is compared, not listed
_Shape = TypeVar("_Shape")


def shaped(kind: type[_Shape], value: object, name: str = "it") -> _Shape:
    """The value that JSON gave, as `kind` declares it. `BadFileError` names the first field that does not fit.

    `kind` may be made of dataclasses, named tuples, lists, tuples, dictionaries with text keys, unions, literals, text,
    paths, booleans, integers of 64 bits, finite numbers, None, and Any.
    """
    return _fit(kind, value, name)


def read_shaped(kind: type[_Shape], path: Path) -> _Shape | None:
    """The JSON object in a file, as `kind`; None where there is no file that can be used."""
    try:
        return shaped(kind, read_object(path))
    except (FileNotFoundError, BadFileError):
        return None


def shaped_lines(kind: type[_Shape], path: Path) -> Iterator[_Shape]:
    """The lines of a file, as `kind`. Those that cannot be read are left out: a crash may have cut one."""
    for line in LineReader(path).new_lines():
        with suppress(BadFileError):
            yield shaped(kind, parse_object(line))


def as_json(value: DataclassInstance) -> dict[str, Any]:
    """The JSON object that `shaped` makes the same dataclass of."""
    return asdict(value, dict_factory=lambda items: {k: str(v) if isinstance(v, Path) else v for k, v in items})


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is what a field of type float may be: no boolean, finite, and not larger than other readers take."""
    try:
        _number(value, "it")
    except BadFileError:
        return False
    return True


def _fit(kind: Any, value: Any, name: str) -> Any:
    if kind is Any:
        return value
    if (plain := _PLAIN.get(kind)) is not None:
        return plain(value, name)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _fit_one_of(arguments, value, name)
    if origin is Literal:
        return value if value in arguments else _misfit(value, name, f"one of {', '.join(map(str, arguments))}")
    if is_dataclass(kind):
        return _fit_dataclass(kind, value, name)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints, items = _hints(kind), _list(value, name)
        if len(items) != len(hints):
            bad(f"{name} has {len(items)} items, not {len(hints)}")
        return kind(*(_fit(hint, item, _inside(name, field)) for (field, hint), item in zip(hints.items(), items)))
    if origin is dict:
        return {key: _fit(arguments[1], item, f"{name}[{key[:40]!r}]") for key, item in _object(value, name).items()}
    assert origin in (list, tuple), f"a field of type {kind} has no shape in JSON"
    return origin(_fit(arguments[0], item, f"an item of {name}") for item in _list(value, name))


def _fit_dataclass(kind: Any, value: Any, name: str) -> Any:
    found, hints = _object(value, name), _hints(kind)
    if unknown := sorted(found.keys() - hints.keys()):
        near = get_close_matches(unknown[0][:40], hints, n=1)
        bad(f"{name} has an unknown field {unknown[0][:40]!r}{f'; the nearest is {near[0]!r}' if near else ''}")
    for field in fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in found:
            bad(f"{name} has no field {field.name!r}")
    return kind(**{field: _fit(hints[field], item, _inside(name, field)) for field, item in found.items()})


def _inside(name: str, field: str) -> str:
    return field if name == "it" else f"{name}.{field}"


def _fit_one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    for kind in kinds[:-1]:
        with suppress(BadFileError):
            return _fit(kind, value, name)
    return _fit(kinds[-1], value, name)


def _integer(value: Any, name: str) -> int:
    if type(value) is not int or value not in _INTEGERS:
        _misfit(value, name, "an integer of 64 bits")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) is int:
        value = float(_integer(value, name))
    if type(value) is not float or not math.isfinite(value):
        _misfit(value, name, "a finite number")
    return value


def _text(value: Any, name: str) -> str:
    if type(value) is not str:
        _misfit(value, name, "text")
    try:
        if b"\0" in os.fsencode(value):  # a path may have bytes that are not UTF-8, as Python escapes them
            bad(f"{name} holds a zero byte")
    except UnicodeEncodeError:
        bad(f"{name} holds half a character")
    return value


def _exactly(kind: type, words: str) -> Callable[[Any, str], Any]:
    def check(value: Any, name: str) -> Any:
        if type(value) is not kind:
            _misfit(value, name, words)
        return value

    return check


_object, _list = _exactly(dict, "an object"), _exactly(list, "a list")
_PLAIN: dict[Any, Callable[[Any, str], Any]] = {
    int: _integer,
    float: _number,
    str: _text,
    Path: lambda value, name: Path(_text(value, name)),
    bool: _exactly(bool, "true or false"),
    types.NoneType: _exactly(types.NoneType, "null"),
}


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _misfit(value: Any, name: str, wanted: str) -> NoReturn:
    if isinstance(value, (list, dict)):
        shown = "an object" if isinstance(value, dict) else "a list"
    else:
        shown = "a larger integer" if type(value) is int and value not in _INTEGERS else f"{json.dumps(value):.60}"
    bad(f"{name} is {shown}, not {wanted}")
