"""Dates, times, decimals and bytes in the values of a record: what a column of Arrow holds and JSON does not.

A queue file has a text (of durations: a number) in the place of each, and a table that says of which type it is. What
is read has the type and the value of what was written; anything else is refused when it is written.
"""

from __future__ import annotations

import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from async_grpo.errors import BadFileError

KeyPath = list[str | int]  # keys and indices that lead to a value


class _Codec(NamedTuple):
    """How values of a type are written, as text or as an integer, and read."""

    write: Callable[[Any], str | int]
    read: Callable[[Any], Any]
    json: type = str


def _with_zone(value: Any) -> str:
    """`2026-11-24T02:30:00+01:00[Europe/Berlin]`, as RFC 9557 has it."""
    zone = f"[{value.tzinfo.key}]" if isinstance(value.tzinfo, ZoneInfo) else ""
    return f"{value.isoformat()}{zone}"


def _datetime(text: str) -> datetime:
    moment, _, zone = text.partition("[")
    read = datetime.fromisoformat(moment)
    return read.astimezone(ZoneInfo(zone.removesuffix("]"))) if zone else read


def _pandas_timestamp(text: str) -> Any:
    from pandas import Timestamp

    moment, _, zone = text.partition("[")
    read = Timestamp(moment).as_unit("ns")
    return read.tz_convert(ZoneInfo(zone.removesuffix("]"))) if zone else read


def _pandas_timedelta(nanoseconds: int) -> Any:
    from pandas import Timedelta

    return Timedelta(nanoseconds, unit="ns")


_KINDS = {
    "date": _Codec(date.isoformat, date.fromisoformat),
    "datetime": _Codec(_with_zone, _datetime),
    "time": _Codec(time.isoformat, time.fromisoformat),
    "timedelta": _Codec(
        lambda value: value // timedelta(microseconds=1), lambda number: timedelta(microseconds=number), int
    ),
    "Decimal": _Codec(str, Decimal),
    "bytes": _Codec(lambda value: b64encode(value).decode(), lambda text: b64decode(text, validate=True)),
    "pandas.Timestamp": _Codec(_with_zone, _pandas_timestamp),  # of nanoseconds, as pyarrow gives them
    "pandas.Timedelta": _Codec(lambda value: int(value.value), _pandas_timedelta, int),
}
_NAMES: dict[type, str] = {kind: kind.__name__ for kind in (date, datetime, time, timedelta, Decimal, bytes)}


def _name_of(value: Any) -> str | None:
    """The name of its type in the table; None: there is none."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and type(value) in (pandas.Timestamp, pandas.Timedelta):
        return f"pandas.{type(value).__name__}"
    return _NAMES.get(type(value))


def can_be_written(value: Any) -> bool:
    """Whether what is read would be the same: a time zone of another package, for one, is not known here."""
    name = _name_of(value)
    if name is None or name == "bytes":
        return name is not None
    try:
        again = _KINDS[name].read(_KINDS[name].write(value))
    except (ValueError, LookupError, ArithmeticError):  # a zone that has no key, a time that pandas does not reach
        return False
    return type(again) is type(value) and (repr(again), _unit(again)) == (repr(value), _unit(value))


def _unit(value: Any) -> Any:
    """The unit of pandas' types, which show the same for different ones."""
    return getattr(value, "unit", None)


def written(values: dict[str, Any]) -> tuple[dict[str, Any], list[list[Any]]]:
    """`values` with JSON in place of each of these values, and the table: `[type, key, key, …]`."""
    table: list[list[Any]] = []

    def write(value: Any, path: KeyPath) -> Any:
        if type(value) is dict:
            return {name: write(item, [*path, name]) for name, item in value.items()}
        if type(value) is list:
            return [write(item, [*path, index]) for index, item in enumerate(value)]
        name = None if type(value) is str else _name_of(value)
        if name is None:
            return value
        table.append([name, *path])
        return _KINDS[name].write(value)

    return write(values, []), table


def read(values: dict[str, Any], table: Any) -> None:
    """Undo `written`, in place. `BadFileError`: the table does not fit."""
    try:
        for name, *path in table:
            inner: Any = values
            for key in path[:-1]:
                inner = inner[key]
            kind, found = _KINDS[name], inner[path[-1]]
            if type(found) is not kind.json:
                raise TypeError(f"a {name} is written as {kind.json.__name__}")
            inner[path[-1]] = kind.read(found)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise BadFileError(f"its table of typed values does not fit: {error}") from error
