"""Dates, times, decimals and bytes of jobs and groups: what is read has the type and the value of what was written."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pandas
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as some
from queue_samples import make_group, make_job

from async_grpo.errors import BadFileError, UnsupportedError
from async_grpo.images import EncodedImage
from async_grpo.queue import typed
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job

BERLIN = ZoneInfo("Europe/Berlin")
NANOSECONDS = pandas.Timestamp("2026-11-24T02:03:04.000000007").as_unit("ns")
VALUES = [
    date(1, 1, 1),
    datetime(2026, 11, 24, 2, 3, 4, 5),
    datetime(2026, 11, 24, tzinfo=UTC),
    datetime(2026, 11, 24, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN),  # this hour comes twice
    datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
    datetime(1890, 1, 1, tzinfo=BERLIN),  # local mean time: an offset of 53 minutes and 28 seconds
    time(23, 59, 59, 999999),
    timedelta(days=-3, microseconds=1),
    timedelta.max,
    *map(Decimal, ("1.50", "-0", "1E+400", "NaN")),
    bytes(range(256)),
    b"",
    NANOSECONDS,
    NANOSECONDS.tz_localize(BERLIN),
    NANOSECONDS.tz_localize(timezone(timedelta(hours=2))),
    pandas.Timedelta(-7, unit="ns"),
]


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    row = {"made": value, "deep": [{"x": [None, value]}], "text": "2026-11-24"}
    job = make_job(1, **row)
    read = decode_job(encode_job(job)).row
    assert same(read["made"], value) and same(read["deep"][0]["x"][1], value) and read["text"] == "2026-11-24"
    group = decode_group(encode_group(replace(make_group(job), extra_columns={"made": [value, None]})))
    assert same(group.extra_columns["made"][0], value) and same(group.job.row["deep"][0]["x"][1], value)


@given(some.one_of(some.datetimes(timezones=some.none() | some.timezones()), some.decimals(), some.timedeltas()))
def test_any_value_comes_back_or_is_refused(value: Any) -> None:
    try:
        data = encode_job(make_job(1, made=value))
    except UnsupportedError:
        assert isinstance(value, datetime) and (value.tzinfo or value.fold), "an hour that the clocks leave out"
    else:
        assert same(decode_job(data).row["made"], value)


class OfAnotherPackage(tzinfo):
    def utcoffset(self, moment: datetime | None) -> timedelta:
        return timedelta(hours=1)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (datetime(2026, 1, 1, tzinfo=OfAnotherPackage()), "datetime.datetime"),
        (datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN), "datetime.datetime"),  # no clock shows it
        (NANOSECONDS.as_unit("s"), "Timestamp"),
        (np.datetime64("2026-01-01"), "numpy.datetime64"),
        (bytearray(b"x"), "bytearray"),
        (range(2), "range"),
        ((1, 2), "tuple"),
        ([{"deep": {1: 2}}], "key of type int"),
        (np.float32(1), "numpy.float32"),
        ({1, 2}, "set"),
        (10**2000, "integer"),
    ],
)
def test_what_would_not_come_back_is_refused_by_column(value: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'made' holds (a value of type|an) .*{named}.*Convert it"):
        encode_job(make_job(1, made=value))


def test_stock_tools_read_the_values_and_their_types(tmp_path: Any) -> None:
    job = make_job(1, made=date(2026, 11, 24), image=EncodedImage(b"png"), note=None)
    (tmp_path / "job").write_bytes(encode_job(job))
    with safetensors.safe_open(tmp_path / "job", "np") as file:
        row = json.loads(file.metadata()["header"])["row"]
        table = json.loads(file.get_tensor("typed_table").tobytes())
    assert (row["made"], row["image"]) == ("2026-11-24", None)
    assert table == {"places": [["date", "header", "row", "made"]]}
    assert decode_job((tmp_path / "job").read_bytes()) == job
    assert b"typed_table" not in encode_job(make_job(1, made="2026-11-24"))


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ([["date", "made"]], "no date"),
        ([["date", "made"]], 7),
        ([["datetime", "made"]], "2026-01-01T00:00:00+00:00[../../etc/passwd]"),
        ([["datetime", "made"]], "2026-01-01T00:00:00+00:00[Nowhere/None]"),
        ([["timedelta", "made"]], 10**30),
        ([["timedelta", "made"]], True),
        ([["Decimal", "made"]], "one"),
        ([["bytes", "made"]], "no base64!"),
        ([["pandas.Timestamp", "made"]], "9999-01-01"),
        ([["pandas.Timedelta", "made"]], 10**30),
        ([["eval", "made"]], "1"),
        ([["date", "other"]], "2026-01-01"),
        ([["date"]], "2026-01-01"),
        ([[]], "2026-01-01"),
        ([7], "2026-01-01"),
        (None, "2026-01-01"),
        ([[["date"], "made"]], "2026-01-01"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: Any, value: Any) -> None:
    with pytest.raises(BadFileError, match="its table of typed values does not fit"):
        typed.read({"made": value}, table)
