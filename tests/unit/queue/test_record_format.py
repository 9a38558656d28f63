"""The record format: every declared field round-trips with its type and value, the page equals the declaration."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import Path
from typing import Any, cast
from zoneinfo import ZoneInfo

import numpy as np
import pandas
import pytest
import safetensors
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from queue_samples import make_group, make_job, same_group

from async_grpo.errors import BadFileError, QueueError, UnsupportedError
from async_grpo.images import EncodedImage
from async_grpo.queue import codec, typed
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job
from async_grpo.queue.schema import columns
from async_grpo.records import Job, Purpose, RolloutGroup, Timings, header, record
from kit.scripts import module_at

ROOT = Path(__file__).parents[3]

json_values = st.recursive(
    st.builds(EncodedImage, st.binary(max_size=5))
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
counts = st.integers(0, 2**62)
texts = st.text(max_size=20)
seconds = st.floats(0, 1e6)
ids = st.integers(0, 2**31 - 1)


def arrays(dtype: Any, shape: Any, **elements: Any) -> st.SearchStrategy[Any]:
    return hnp.arrays(dtype, shape, elements=elements) if elements else hnp.arrays(dtype, shape)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    values = {
        "run_id": texts,
        "seq": counts,
        "row": st.dictionaries(texts, json_values, max_size=4),
        "num_generations": st.integers(1, 4),
        "seed": counts,
        "born_version": counts,
        "min_version": counts,
        "purpose": st.sampled_from(["train", "eval", "generate"]),
        "sampling": st.dictionaries(texts, json_values, max_size=3),
        "task": texts,
        "trainer_state": st.dictionaries(texts, json_values, max_size=2),
        "prefix_ids": st.lists(ids, max_size=3).map(tuple),
    }
    assert list(values) == [field.name for field in fields(Job)], "a field of Job is not tried"
    return Job(**{name: draw(strategy) for name, strategy in values.items()})


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    job = draw(jobs())
    lengths, turns, prompts = (draw(arrays(np.int32, job.num_generations, min_value=0, max_value=5)) for _ in range(3))
    tokens, names = int(lengths.sum()), draw(st.lists(texts, max_size=3, unique=True))
    version = draw(st.integers(0, 1000))
    has_turns, has_prompts = draw(st.booleans()), draw(st.booleans())
    values: dict[str, Any] = {
        "job": job,
        "attempt": draw(counts),
        "worker": draw(texts),
        "policy_version": version,
        "reward_names": tuple(names),
        "metrics": draw(st.dictionaries(texts, st.lists(st.floats(allow_nan=False), max_size=3), max_size=3)),
        "added_metrics": draw(st.dictionaries(texts, st.lists(st.floats(allow_nan=False), max_size=2), max_size=2)),
        "timings": Timings(**{field.name: draw(seconds) for field in fields(Timings)}),
        "node": draw(texts),
        "prompt_ids": draw(arrays(np.int32, int(prompts.sum()) if has_prompts else st.integers(0, 5), min_value=0)),
        "prompt_lengths": prompts if has_prompts else None,
        "completion_lengths": lengths,
        "completion_ids": draw(arrays(np.int32, tokens, min_value=0)),
        "sampling_logprobs": draw(arrays(np.float32, tokens, min_value=-50, max_value=0)),
        "rewards": draw(arrays(np.float32, (job.num_generations, len(names)))),
        "turn_counts": turns if has_turns else None,
        "turn_rewards": draw(arrays(np.float32, int(turns.sum()))) if has_turns else None,
        "token_versions": draw(st.none() | arrays(np.int32, tokens, min_value=version, max_value=2**31 - 1)),
        "tool_mask": draw(st.none() | arrays(np.uint8, tokens, min_value=0, max_value=1)),
        "kept_tokens": None,  # test_kept_tokens.py
        "completions": draw(st.lists(json_values, min_size=job.num_generations, max_size=job.num_generations)),
        "extra_columns": draw(st.dictionaries(texts, st.lists(json_values, max_size=3), max_size=2)),
        "prompts": draw(st.sampled_from([[], ["one"], [f"of row {row}" for row in range(job.num_generations)]])),
    }
    assert list(values) == [field.name for field in fields(RolloutGroup)], "a field of RolloutGroup is not tried"
    return RolloutGroup(**values)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(job=jobs())
def test_every_field_of_a_job_comes_back(job: Job) -> None:
    assert decode_job(encode_job(job)) == job


@settings(max_examples=60, deadline=None, derandomize=True)
@given(group=groups())
def test_every_field_of_a_group_comes_back(group: RolloutGroup) -> None:
    assert same_group(group, decode_group(encode_group(group)))


def test_the_page_equals_the_declaration() -> None:
    script = module_at(ROOT / "scripts" / "record_format.py")
    page = script.PAGE.read_text()
    assert page == script.page_with_tables(page), "run: python scripts/record_format.py --write"
    for declared in (Job, Timings, RolloutGroup):
        assert all(f"| `{field.name}` |" in page for field in fields(declared))


def test_a_field_is_in_the_files_of_its_format_and_of_later_ones() -> None:
    @record
    class Newer:
        seq: int = header("integer", "of the first format")
        node: str = header("text", "of the second", default="here", since=2)

    assert [list(columns(Newer, number)) for number in (1, 2)] == [["seq"], ["seq", "node"]]


def test_a_file_of_the_first_format_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    job, group = make_job(1), make_group(make_job(1))
    monkeypatch.setattr(codec, "_JOB", codec._JOBS["async-grpo-job/1"])
    monkeypatch.setattr(codec, "_GROUP", codec._GROUPS["async-grpo-group/1"])
    data, of_group = encode_job(job), encode_group(group)
    assert b"prefix_ids" not in data + of_group
    assert decode_job(data) == job
    assert same_group(group, decode_group(of_group))


@pytest.mark.parametrize("ids", [(-1,), (1 << 31,), (True,), (1.0,)])
def test_a_prefix_has_token_ids_only(ids: Any) -> None:
    with pytest.raises(QueueError, match="prefix_ids is not a valid list of tokens"):
        encode_job(replace(make_job(1), prefix_ids=ids))


def test_an_unknown_purpose_is_neither_written_nor_read() -> None:
    job = make_job(1)
    with pytest.raises(QueueError, match="purpose is 'other', not one of train, eval, generate"):
        encode_job(replace(job, purpose=cast("Purpose", "other")))
    data = encode_job(job).replace(b': \\"train', b': \\"trail')
    before, after = data[:37], data[45:]
    with pytest.raises(BadFileError, match="purpose is 'trail', not one of train"):
        decode_job(before + b"%08x" % crc32c(after, crc32c(before)) + after)


# --- Dates, times, decimals and bytes of jobs and groups: --------------------------------------------------------

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
        (bytearray(b"x"), "bytearray"),
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
        ([["timedelta", "made"]], 10**30),
        ([["timedelta", "made"]], True),
        ([["Decimal", "made"]], "one"),
        ([["bytes", "made"]], "no base64!"),
        ([["pandas.Timestamp", "made"]], "9999-01-01"),
        ([["pandas.Timedelta", "made"]], 10**30),
        ([["eval", "made"]], "1"),
        ([["date", "other"]], "2026-01-01"),
        ([[]], "2026-01-01"),
        ([7], "2026-01-01"),
        (None, "2026-01-01"),
        ([[["date"], "made"]], "2026-01-01"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: Any, value: Any) -> None:
    with pytest.raises(BadFileError, match="its table of typed values does not fit"):
        typed.read({"made": value}, table)
