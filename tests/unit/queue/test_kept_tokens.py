"""The sets of kept tokens in a group's file: they come back, they are small, and what is not sound is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from queue_samples import make_group, make_job, same_group

from async_grpo.errors import BadFileError, BadGroupError
from async_grpo.queue.codec import decode_group, encode_group
from async_grpo.tokens import kept_tokens
from async_grpo.tokens.kept_tokens import Kept, pack, unpack

VOCABULARY = 152_064
LARGEST = 2**31 - 1


def kept(*sets: Sequence[int]) -> list[Kept]:
    return [np.array(each, np.int32).tobytes() for each in sets]


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def frame(*numbers: int) -> NDArray[np.uint8]:
    """What a file would have of these numbers."""
    stream = kept_tokens._encoded(np.array(numbers, np.int64))
    return np.frombuffer(zstandard.compress(stream.tobytes()), np.uint8)


@st.composite
def sampled(draw: st.DrawFn) -> tuple[list[list[int]], NDArray[np.int32]]:
    """Sets, of which some are not known, and a token of each."""
    ids = st.integers(0, LARGEST) | st.integers(0, 300)
    sets = draw(st.lists(st.sets(ids, max_size=12).map(sorted), max_size=30))
    drawn = [draw(st.sampled_from(each)) if each else draw(ids) for each in sets]
    return sets, np.array(drawn, np.int32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=sampled())
def test_every_set_comes_back(drawn: tuple[list[list[int]], NDArray[np.int32]]) -> None:
    sets, ids = drawn
    back = unpack(pack(kept(*sets), ids), ids)
    assert back.sizes.tolist() == [len(each) for each in sets]
    found = np.split(back.ids, np.cumsum(back.sizes))[:-1]
    for each, token, expected in zip(found, ids.tolist(), sets, strict=True):
        assert not expected or each[0] == token, "the sampled token comes first"
        assert sorted(each.tolist()) == expected


def test_a_group_has_its_sets_in_its_file() -> None:
    group = make_group(make_job(3))
    sets = kept(*[sorted({int(token), 7, 30}) for token in group.completion_ids])
    group = make_group(make_job(3), kept_tokens=pack(sets, group.completion_ids))
    back = decode_group(encode_group(group))
    assert same_group(group, back)
    assert back.kept_tokens is not None
    assert set(unpack(back.kept_tokens, back.completion_ids).sizes.tolist()) <= {2, 3}


def test_where_one_token_was_kept_its_set_costs_nearly_nothing() -> None:
    """Three tokens of four are certain in the answers of a trained model; the others had up to 20 to choose from."""
    random = np.random.default_rng(0)
    sets = [sorted({*random.integers(0, VOCABULARY, n).tolist()}) for n in np.where(random.random(4096) < 0.75, 1, 20)]
    ids = np.array([each[0] for each in sets], np.int32)
    packed = pack(kept(*sets), ids)
    stored = sum(len(each) for each in sets)
    assert len(packed) < 0.5 * 4 * stored, f"{len(packed)} bytes for {stored} ids"
    assert len(pack(kept(*[[int(token)] for token in ids]), ids)) < 40


@pytest.mark.parametrize(
    ("sets", "ids", "why"),
    [
        ([[3, 5]], [4], "sampled token is not among"),
        ([[3, 3]], [3], "sampled token is not among"),
        ([[5, 4, 3]], [5], "ascending"),
        ([[-1, 3]], [3], "ascending"),
        ([[3]], [3, 4], "1 sets of kept tokens for 2 tokens"),
    ],
)
def test_sets_that_are_none_are_not_written(sets: list[list[int]], ids: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pack(kept(*sets), tokens(*ids))


HOSTILE: list[tuple[Any, str]] = [
    (np.frombuffer(b"no frame", np.uint8), "cannot be decompressed"),
    (np.frombuffer(zstandard.compress(b"\x00\x00") + b"more", np.uint8), "cannot be decompressed"),
    (np.frombuffer(zstandard.compress(b"\x01\x00\x80"), np.uint8), "the last number is cut"),
    (np.frombuffer(zstandard.compress(b"\x80\x80\x80\x80\x80\x00\x00"), np.uint8), "a number is too large"),
    (np.frombuffer(zstandard.compress(b""), np.uint8), "0 numbers, which do not fit 2 tokens"),
    (frame(1), "1 numbers, which do not fit 2 tokens"),
    (frame(2, 2, 9), "3 numbers, which do not fit"),
    (frame(1, 2, 2**31), "one of them is no token"),
    (frame(1, 3, LARGEST, 0), "one of them is no token"),
    (frame(1, 2, 11), "the sampled token again"),
]


@pytest.mark.parametrize(("packed", "why"), HOSTILE)
def test_what_is_not_sound_is_refused(packed: NDArray[np.uint8], why: str) -> None:
    with pytest.raises(BadFileError, match=f"its kept tokens are not sound: {why}|{why}"):
        unpack(packed, tokens(10, 11))


def test_a_frame_that_would_unfold_to_too_much_is_refused_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstandard.compress(bytes(1 << 20))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    monkeypatch.setattr(kept_tokens, "MOST_BYTES", 1 << 16)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    for data in (bomb, silent):
        with pytest.raises(BadFileError, match=r"would unfold to .* bytes, over the limit of 65,536"):
            unpack(np.frombuffer(data, np.uint8), tokens(1))


def test_sets_that_are_too_large_together_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokens, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=re.escape("smaller top_k or top_p")):
        pack(kept(range(200)), tokens(0))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.binary(max_size=40), compressed=st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, compressed: bool) -> None:
    packed = np.frombuffer(zstandard.compress(data) if compressed else data, np.uint8)
    try:
        back = unpack(packed, tokens(1, 2, 3))
    except BadFileError:
        return
    assert len(back.sizes) == 3 and back.sizes.sum() == len(back.ids) and (back.ids >= 0).all()


def test_a_group_with_unsound_sets_is_neither_written_nor_read() -> None:
    group = make_group(make_job(3), kept_tokens=frame(1, 1))
    with pytest.raises(BadGroupError, match="kept tokens are not sound"):
        encode_group(group)
