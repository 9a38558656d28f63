"""The fields of `Job` and `RolloutGroup` in files of one format, worked out from what `records.py` declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from async_grpo.errors import BadFileError, UnsupportedError
from async_grpo.images import EncodedImage
from async_grpo.queue.typed import can_be_written
from async_grpo.records import Stored
from async_grpo.rundir.reading import is_nested_deeper


class Dtype(NamedTuple):
    """A dtype of tensors, as others name it."""

    safetensors: str
    numpy: str
    item_bytes: int


IMAGES, TABLE = "images", "image_table"  # the tensors of a file with images
TYPED = "typed_table"  # the tensor of a file with dates, times, decimals or bytes
MAX_NESTING = 100  # of a value in a column

DTYPES = {"int32": Dtype("I32", "<i4", 4), "float32": Dtype("F32", "<f4", 4), "uint8": Dtype("U8", "|u1", 1)}


class _Kind(NamedTuple):
    """A kind of JSON value: its type, what else must hold, and how it is made of the record's value and back."""

    type: type
    is_sound: Callable[[Any], bool] | None = None
    write: Callable[[Any], Any] | None = None
    read: Callable[[Any], Any] | None = None


def _all_are(kind: type, values: Iterable[object]) -> bool:
    return all(type(value) is kind for value in values)


_KINDS = {
    "text": _Kind(str),
    "integer": _Kind(int, lambda number: -(1 << 63) <= number < 1 << 63),  # torch and numpy take no more
    "number": _Kind(float, write=float),
    "object": _Kind(dict),
    "list": _Kind(list),
    "list of text": _Kind(list, lambda names: _all_are(str, names), write=list, read=tuple),
    "list of tokens": _Kind(
        list, lambda ids: _all_are(int, ids) and all(0 <= token < 1 << 31 for token in ids), write=list, read=tuple
    ),
    "object of lists": _Kind(dict, lambda lists: _all_are(list, lists.values())),
    "object of lists of numbers": _Kind(
        dict,
        lambda lists: all(type(values) is list and _all_are(float, values) for values in lists.values()),
        write=lambda lists: {name: [float(value) for value in values] for name, values in lists.items()},
    ),
}


def _kind(about: Stored) -> _Kind:
    return _KINDS[about.kind] if isinstance(about.kind, str) else _KINDS["object"]


def _rules(about: Stored) -> Iterator[tuple[Callable[[Any], bool], str]]:
    """What must hold of a value of the right type, each with what is said of a value for which it does not."""
    if is_sound := _kind(about).is_sound:
        yield is_sound, f"is not a valid {about.kind}"
    if (least := about.least) is not None:
        yield (lambda number: number >= least), f"is {{}}, less than {least}"
    if choices := about.choices:
        yield (lambda text: text in choices), f"is {{!r:.40}}, not one of {', '.join(choices)}"


class JsonValues:
    """The JSON values of a record: those in the header of a file, or its texts."""

    def __init__(self, record: type, number: int, section: str) -> None:
        self.record = record
        self.columns = {name: about for name, about in columns(record, number).items() if about.section == section}
        kinds = {name: _kind(about) for name, about in self.columns.items()}
        self._names, self._types = list(kinds), [kind.type for kind in kinds.values()]
        self._free = [(name, about.item) for name, about in self.columns.items() if about.item]
        self._rules = [(name, *rule) for name, about in self.columns.items() for rule in _rules(about)]
        self._written = [(name, kind.write) for name, kind in kinds.items() if kind.write]
        self._read = [(name, kind.read) for name, kind in kinds.items() if kind.read]
        self._nested = [
            (name, JsonValues(about.kind, number, section))
            for name, about in self.columns.items()
            if isinstance(about.kind, type)
        ]

    def of(self, record: Any, beside: list[Any]) -> dict[str, Any]:
        """What a file holds of `record`. `UnsupportedError` names what it cannot hold exactly.

        Args:
            beside: what is in the values and is no JSON, but can be sent (images, dates, bytes, …) is added.
        """
        values = {name: getattr(record, name) for name in self.columns}
        for name, item in self._free:
            require_exact(values[name], item, beside)
        for name, nested in self._nested:
            values[name] = nested.of(values[name], beside)
        for name, write in self._written:
            values[name] = write(values[name])
        return values

    def misfit(self, values: dict[str, Any]) -> str | None:
        """Why `values` are not valid, or None. Nested records are not looked into."""
        if list(values) != self._names:
            return f"the {self.record.__name__} has fields {str(list(values))[:200]}, not {self._names}"
        if list(map(type, values.values())) != self._types:
            name = next(n for n, kind in zip(self._names, self._types, strict=True) if type(values[n]) is not kind)
            return f"{name} is of type {type(values[name]).__name__}, not {_kind(self.columns[name]).type.__name__}"
        for name, holds, otherwise in self._rules:
            if not holds(values[name]):
                return f"{name} {otherwise.format(values[name])}"
        for name, _ in self._free:
            if values[name] and is_nested_deeper(values[name], MAX_NESTING + 2):  # the column is the first of them
                return f"{name} is nested too deeply"
        return None

    def fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Turn what a file holds into the record's fields. `BadFileError` says what is wrong with it."""
        if reason := self.misfit(values):
            raise BadFileError(reason)
        for name, nested in self._nested:
            values[name] = nested.record(**nested.fields(values[name]))
        for name, read in self._read:
            values[name] = read(values[name])
        return values


class Schema:
    """What files of a record hold in one format. Its parts are worked out once, at import."""

    def __init__(self, record: type, name: str, number: int) -> None:
        self.format = f"async-grpo-{name}/{number}"
        self.header, self.texts = JsonValues(record, number, "header"), JsonValues(record, number, "texts")
        self.arrays = {name: about for name, about in columns(record, number).items() if about.section == "tensor"}
        self.dtypes = {name: DTYPES[str(about.kind)] for name, about in self.arrays.items()}
        self.dimensions = {name: len(about.shape) for name, about in self.arrays.items()}
        if self.texts.columns:
            self.dtypes["texts"], self.dimensions["texts"] = DTYPES["uint8"], 1
        self.required = self.dtypes.keys() - {field.name for field in fields(record) if field.default is None}
        self.dtypes |= dict.fromkeys((IMAGES, TABLE, TYPED), DTYPES["uint8"])
        self.dimensions |= dict.fromkeys((IMAGES, TABLE, TYPED), 1)


def columns(record: type, number: int) -> dict[str, Stored]:
    """How files of format `number` hold the fields of a record, in the order of their declaration."""
    declared: dict[str, Stored] = {field.name: field.metadata["stored"] for field in fields(record)}
    return {name: about for name, about in declared.items() if about.since <= number}


def require_exact(values: dict[str, Any] | list[Any], what: str, beside: list[Any]) -> None:
    """Refuse what a queue file would change or cannot hold. NaN and infinity are written and read back."""
    for name, value in values.items() if type(values) is dict else enumerate(values):
        if type(value) is str and type(name) in (str, int):
            continue  # nearly always
        if type(name) not in (str, int):
            raise UnsupportedError(f"A {what} is named by a {type(name).__name__}; only text names can be sent.")
        found = _inexact(value, beside, depth=0)
        if found:
            raise UnsupportedError(
                f"The {what} {name!r} holds {found}, which cannot be sent to workers exactly: a queue file "
                "holds images, dates, times, decimals, bytes and JSON values (text, numbers, true, false, null, lists, "
                "objects with text keys). Convert it or leave it out."
            )


def _inexact(value: Any, beside: list[Any], depth: int) -> str | None:
    """The first thing in `value` that a file cannot hold exactly, in words, or None."""
    kind = type(value)
    if kind in (str, float, bool) or value is None:
        return None
    if kind is int:
        return None if value.bit_length() < 4096 else "an integer of over 1,000 digits"
    if depth > MAX_NESTING:
        return f"over {MAX_NESTING} levels of nesting"
    if kind is dict:
        for key in value:
            if type(key) is not str:
                return f"an object with a key of type {type(key).__name__}"
        inner = value.values()
    elif kind is list:
        inner = value
    elif kind is EncodedImage or can_be_written(value):
        beside.append(value)
        return None
    else:
        return f"a value of type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
    return next((found for item in inner if (found := _inexact(item, beside, depth + 1))), None)
