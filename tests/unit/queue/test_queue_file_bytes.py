"""Bytes of queue files: what goes in comes out exactly, stock tools open it, the rest is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
import safetensors
from queue_samples import RUN, make_group, make_job, same_group

from async_grpo.errors import BadFileError, BadGroupError, QueueError, UnsupportedError
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job
from async_grpo.queue.names import COMPLETE, JobName


def test_a_row_may_hold_nan_infinity_and_lone_surrogates() -> None:
    job = make_job(1, nan=math.nan, inf=-math.inf, odd="\ud800 é")
    row = decode_job(encode_job(job)).row
    assert math.isnan(row["nan"])
    assert row["inf"] == -math.inf
    assert row["odd"] == "\ud800 é"


@pytest.mark.parametrize("tool_mask", [None, np.array([0, 1, 1, 0, 0, 1, 1], np.uint8)])
def test_a_group_comes_back_exactly(tool_mask: Any) -> None:
    group = make_group(make_job(3), attempt=2, worker="dev4", tool_mask=tool_mask)
    back = decode_group(encode_group(group), JobName(3, 2, COMPLETE, "dev4"), RUN)
    assert same_group(group, back)
    assert back.completion_ids.flags.writeable  # torch.from_numpy takes it without a warning


def test_stock_safetensors_opens_both(tmp_path: Any) -> None:
    job = make_job(1, odd="\ud800 é")
    (tmp_path / "job").write_bytes(encode_job(job))
    (tmp_path / "group").write_bytes(encode_group(make_group(job)))
    with safetensors.safe_open(tmp_path / "job", "np") as file:
        assert set(file.metadata()) == {"format", "header", "crc32c"}
    with safetensors.safe_open(tmp_path / "group", "np") as file:
        assert file.get_tensor("completion_lengths").tolist() == [3, 4]


TURNS = np.array([1, 1], np.int32)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("sampling_logprobs", np.full(7, np.nan, np.float32), "sampling_logprobs holds a value that is not finite"),
        ("rewards", np.zeros((2, 1), np.float32), "rewards has shape"),
        ("completion_lengths", np.array([3, 5], np.int32), r"completion_ids has shape \(7,\), not \(8,\)"),
        ("completion_lengths", np.array([-1, 8], np.int32), "completion_lengths holds a value below 0"),
        ("completion_ids", np.zeros(7, np.int64), "completion_ids must be int32"),
        ("completion_ids", np.full(7, -1, np.int32), "completion_ids holds a value below 0"),
        ("tool_mask", np.full(7, 2, np.uint8), "tool_mask holds a value above 1"),
        ("completions", ["one"], "1 completions"),
        ("prompts", ["one", "two", "three"], "3 prompts for 2 generations"),
        ("prompt_lengths", np.array([2, 2], np.int32), r"prompt_ids has shape \(5,\), not \(4,\)"),
        ("metrics", {"mood": ["good"]}, "could not convert string to float"),
        ("token_versions", np.full(7, 2, np.int32), "a token version is older"),
        ("turn_counts", TURNS, "must be given together"),
        ("turn_rewards", np.zeros(3, np.float32), "turn_rewards has shape"),
    ],
)
def test_a_group_that_contradicts_itself_is_not_written(field: str, value: Any, reason: str) -> None:
    changes = {"turn_counts": TURNS} if field == "turn_rewards" else {}
    with pytest.raises(BadGroupError, match=reason):
        encode_group(make_group(make_job(1), **changes, **{field: value}))


@pytest.mark.parametrize("levels", [101, 102, 500, 900])
@pytest.mark.parametrize("column", ["row", "completions", "extra_columns"])
def test_a_value_is_nested_no_deeper_than_what_is_written(
    column: str, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that goes through such a value would raise RecursionError, at some 490 levels already."""
    value = reduce(lambda inner, _: [inner], range(levels), "x")
    if column == "row":
        group = make_group(make_job(1, deep=value))
    else:
        group = make_group(make_job(1), **{column: [value, "y"] if column == "completions" else {"note": value}})
    if levels == 101:
        decode_group(encode_group(group))
        return
    with pytest.raises(UnsupportedError, match="over 100 levels of nesting"):
        encode_group(group)
    monkeypatch.setattr("async_grpo.queue.schema._inexact", lambda *_, **__: None)
    with pytest.raises(BadFileError, match="is nested too deeply"):
        decode_group(encode_group(group))


def test_a_file_of_an_unknown_format_is_refused_by_name() -> None:
    newer = encode_job(make_job(1)).replace(b"async-grpo-job/2", b"async-grpo-job/3")
    with pytest.raises(BadFileError, match="is 'async-grpo-job/3', not 'async-grpo-job/2' or 'async-grpo-job/1'"):
        decode_job(newer)


def test_every_byte_is_under_the_checksum() -> None:
    data = encode_job(make_job(1))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x01
        with pytest.raises(BadFileError):
            decode_job(damaged)


@pytest.mark.parametrize("number", [10**4000, -(10**4000), 1 << 63])
@pytest.mark.parametrize("field", ["policy_version", "attempt"])
def test_a_group_with_a_number_that_torch_and_numpy_cannot_hold_is_refused(field: str, number: int) -> None:
    data = encode_group(make_group(make_job(1), **{field: number}))
    with pytest.raises(BadFileError, match=f"{field} is not a valid integer"):
        decode_group(data)
    with pytest.raises(QueueError, match="seed is not a valid integer"):
        encode_job(replace(make_job(1), seed=number))


@pytest.mark.parametrize(("version", "sound"), [(1 << 31, False), (3, True), (-(1 << 40), True)])
def test_token_versions_are_compared_with_any_policy_version(version: int, sound: bool) -> None:
    group = make_group(make_job(1), token_versions=np.full(7, 3, np.int32), policy_version=version)
    if sound:
        assert same_group(decode_group(encode_group(group)), group)
    else:
        with pytest.raises(QueueError, match="a token version is older"):
            encode_group(group)
