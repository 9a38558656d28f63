"""Differences of named buffers: exact for any bits, refused where they do not fit, never a wrong result."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.deltas import delta as delta_module
from async_grpo.deltas.chain import TensorKind
from async_grpo.deltas.coding import DeltaError, Words, change, code
from async_grpo.deltas.delta import Delta, DeltaHeader, Weights, apply, encode, pack, read, read_header
from async_grpo.deltas.tensors import KNOWN_BYTES, as_tensors, copied, kinds_of
from async_grpo.errors import DeltaChainError

SHAPES = st.one_of(
    st.just(()), st.just((0,)), st.just((3, 0, 2)), st.tuples(st.integers(1, 300)), st.tuples(st.just(7), st.just(11))
)


@st.composite
def versions(draw: st.DrawFn) -> tuple[dict[str, Words], dict[str, Words]]:
    """Two versions of some tensors, with any bits, of which any share differs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new = {}, {}
    for number in range(draw(st.integers(1, 4))):
        item, shape = draw(st.sampled_from(KNOWN_BYTES)), draw(SHAPES)
        before = rng.integers(0, 256, (*shape, item), dtype=np.uint8)
        after = before.copy()
        where = rng.random(shape) < draw(st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]))
        after[where] = rng.integers(0, 256, (int(where.sum()), item), dtype=np.uint8)
        old[f"layer.{number}"] = before.view(f"<u{item}").reshape(shape)
        new[f"layer.{number}"] = after.view(f"<u{item}").reshape(shape)
    return old, new


def same(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and np.array_equal(first[name], second[name]) for name in first
    )


def reading(data: bytes, read: Callable[[int], Any] = read) -> Any:
    with os.fdopen(os.memfd_create("delta"), "wb", buffering=0) as file:
        file.write(data)
        return read(file.fileno())


def packed(delta: Delta) -> bytes:
    return b"".join(pack(delta))


def zeros(like: Weights) -> dict[str, Words]:
    return {name: np.zeros_like(words) for name, words in like.items()}


@settings(max_examples=15, deadline=None)
@given(versions())
def test_any_two_versions_come_back_bit_for_bit(pair: tuple[dict[str, Words], dict[str, Words]]) -> None:
    come_back(*pair)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(versions())
def test_any_of_many_versions_come_back_bit_for_bit(pair: tuple[dict[str, Words], dict[str, Words]]) -> None:
    come_back(*pair)


def come_back(old: dict[str, Words], new: dict[str, Words]) -> None:
    header = replace(encode(old, new).header, chain="c", version=7, before=5)
    delta = reading(packed(Delta(header, encode(old, new).frames)))
    assert delta.header == header and header.span == 2
    changed = {name: words.copy() for name, words in old.items()}
    apply(delta, changed)
    assert same(changed, new)
    made = zeros(new)
    apply(reading(packed(encode(None, new))), made)
    assert same(made, new)


def test_bits_that_floats_would_hide_are_kept() -> None:
    """-0.0 equals 0.0, a NaN equals nothing, and denormals may count as zero."""
    before = torch.tensor([0.0, -0.0, float("nan"), 1e-45, 1.0])
    after = torch.tensor([-0.0, 0.0, float("nan"), 0.0, 1.0])
    after.view(torch.int32)[2] |= 0x1234  # another payload
    old, new = dict(copied([("w", before)])), dict(copied([("w", after)]))
    apply(encode(old, new), old)
    rebuilt = as_tensors(old, kinds_of({"w": after}))["w"]
    assert torch.equal(rebuilt.view(torch.int32), after.view(torch.int32))


DTYPES = [
    *("bool", "uint8", "int16", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e5m2"),
]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_torch_goes_there_and_back(name: str) -> None:
    bits, dtype = torch.arange(48, dtype=torch.uint8), getattr(torch, name)
    tensor = (bits % 2).bool() if name == "bool" else bits.view(dtype)
    tensors = {"t": tensor.reshape(2, -1), "scalar": tensor[0]}
    new = dict(copied(tensors.items()))
    made = zeros(new)
    apply(encode(None, new), made)
    back = as_tensors(made, kinds_of(tensors))
    assert back["t"].dtype == dtype and back["scalar"].shape == ()
    assert torch.equal(back["t"].view(torch.uint8).flatten(), tensor.view(torch.uint8).flatten())


def test_a_dtype_that_words_cannot_hold_is_refused() -> None:
    with pytest.raises(DeltaChainError, match=r"Tensor t is torch.complex128, .* Leave --delta-every out"):
        kinds_of({"t": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(DeltaChainError, match="has the dtype load, which this torch does not know"):
        as_tensors({"t": np.zeros(2, "<u2")}, {"t": TensorKind("load", 2, [2])})


def test_a_transposed_tensor_is_read_in_the_order_of_its_elements() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3).T
    assert torch.equal(as_tensors(dict(copied([("t", tensor)])), kinds_of({"t": tensor}))["t"], tensor)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.9])
def test_few_changes_are_a_small_frame_and_none_is_none(share: float) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 200_000, dtype=np.uint16)
    new = old ^ ((rng.random(len(old)) < share) * rng.integers(1, 4, len(old))).astype(np.uint16)
    frame = code(old, new)
    assert (len(frame) > 0) == (share > 0) and len(frame) <= 2.5 * share * len(old)
    if frame:
        change(old, frame)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("gap", [255, 256, 65_535, 65_536, 300_000])
def test_gaps_of_every_width(gap: int) -> None:
    old = np.zeros(gap + 70_000, np.uint32)
    new = old.copy()
    new[[0, gap, len(new) - 1]] = 5
    change(old, code(old, new))
    assert np.array_equal(old, new)


W = np.arange(2, dtype="<u2")


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ({"a": W, "b": W, "c": W}, "Tensor c was not there"),
        ({"a": W}, "Tensor b .* is not there:"),
        ({"a": W, "b": W.astype("<u4")}, r"Tensor b was uint16 \[2\] and is uint32 \[2\]:"),
        ({"a": W, "b": W.reshape(2, 1)}, r"Tensor b .* is uint16 \[2, 1\]"),
    ],
)
def test_a_tensor_that_appears_vanishes_or_changes_is_named(new: dict[str, Words], said: str) -> None:
    with pytest.raises(DeltaError, match=said):
        encode({"a": W, "b": W}, new)


def test_a_delta_is_refused_by_every_other_version() -> None:
    first, second, third = ({"w": np.full(4, value, np.uint8)} for value in (1, 2, 3))
    for base in (second, third, {"v": first["w"]}):
        with pytest.raises(DeltaError, match="starts from the version with the hash"):
            apply(encode(first, second), base)
    with pytest.raises(DeltaError, match="instead of"):
        apply(encode(None, first), second)


def test_each_byte_of_a_file_that_flips_is_noticed() -> None:
    old = {"w": np.arange(300, dtype=np.uint16)}
    new = {"w": np.roll(old["w"], 8)}
    data = packed(encode(old, new))
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x40
        with pytest.raises(DeltaError):
            reading(bytes(broken))
    for length in range(0, len(data), 7):
        with pytest.raises(DeltaError, match="cut off"):
            reading(data[:length], read_header)
    with pytest.raises(DeltaError):
        reading(data + b"\0", read_header)


OLD, NEW = {"w": np.zeros(4000, np.uint16)}, {"w": np.zeros(4000, np.uint16)}
NEW["w"][::50] = 9
LONGER = np.zeros(5000, np.uint16)
LONGER[4500] = 1


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"no frame", "cannot be decompressed"),
        (zstandard.compress(bytes(8001)), "more than the 8,000 of the tensor"),
        (zstandard.compress(bytes(13)), "no number of changes"),
        (code(None, LONGER), "changes element 4,500 of 4,000"),
        (code(None, OLD["w"] + 1), "instead of"),
    ],
)
def test_a_delta_that_lies_is_refused(frame: bytes, said: str) -> None:
    """With checksums that fit, as a hostile writer would make them."""
    header = encode(OLD, NEW).header
    with pytest.raises(DeltaError, match=said):
        apply(reading(packed(Delta(header, {"w": frame}))), zeros(OLD))
    with pytest.raises(DeltaError, match="has a tensor v"):
        apply(Delta(header, {"v": frame}), OLD)


def test_more_than_the_memory_that_is_free_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file may be a hole of terabytes."""
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:  1 kB\n")
    monkeypatch.setattr(delta_module, "_MEMORY", tmp_path / "meminfo")
    with pytest.raises(DeltaError, match=r"it needs 1,025 bytes, and 1,024 bytes of memory are free"):
        reading(bytes(1025))


def test_half_of_a_surrogate_pair_is_no_id_of_a_chain() -> None:
    with pytest.raises(DeltaError, match="half a character"):
        reading(packed(Delta(DeltaHeader(chain="c\ud800", base=None, result="0"), {})), read_header)
