"""Differences of named buffers: exact for any bits, refused where they do not fit, never a wrong result."""

from __future__ import annotations

import importlib.util
import io
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo_ipc import delta as delta_package
from async_grpo_ipc.delta import Buffer, Delta, DeltaError, apply, coding, digest, encode, file
from async_grpo_ipc.delta.buffers import ITEM_BYTES
from async_grpo_ipc.delta.tensors import DTYPE_OF, as_tensors, copied

SHAPES = st.one_of(
    st.just(()), st.just((0,)), st.just((3, 0, 2)), st.tuples(st.integers(1, 300)), st.tuples(st.just(7), st.just(11))
)


@st.composite
def versions(draw: st.DrawFn) -> tuple[dict[str, Buffer], dict[str, Buffer]]:
    """Two versions of some tensors, with any bits, of which any share differs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new = {}, {}
    for number in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(sorted(ITEM_BYTES))), draw(SHAPES)
        size, item = int(np.prod(shape)), ITEM_BYTES[dtype]
        before = rng.integers(0, 256, size * item, dtype=np.uint8)
        after = before.copy().reshape(size, item)
        where = rng.random(size) < draw(st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]))
        after[where] = rng.integers(0, 256, (int(where.sum()), item), dtype=np.uint8)
        old[f"layer.{number}"] = Buffer(dtype, shape, before)
        new[f"layer.{number}"] = Buffer(dtype, shape, after.reshape(-1))
    return old, new


def same(first: dict[str, Buffer], second: dict[str, Buffer]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].kind == second[name].kind and np.array_equal(first[name].data, second[name].data) for name in first
    )


def through_a_file(delta: Delta) -> Delta:
    data = b"".join(file.pack(delta, {"version": 7}))
    found, about = file.read(io.BytesIO(data))
    assert about == {"version": 7}
    return found


@settings(max_examples=15, deadline=None)
@given(versions())
def test_any_two_versions_come_back_bit_for_bit(pair: tuple[dict[str, Buffer], dict[str, Buffer]]) -> None:
    come_back(*pair)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(versions())
def test_any_of_many_versions_come_back_bit_for_bit(pair: tuple[dict[str, Buffer], dict[str, Buffer]]) -> None:
    come_back(*pair)


def come_back(old: dict[str, Buffer], new: dict[str, Buffer]) -> None:
    kept = {name: buffer.copy() for name, buffer in old.items()}
    delta = through_a_file(encode(old, new))
    assert same(apply(delta, old), new)
    assert same(old, kept)  # not written to
    assert same(apply(through_a_file(encode(None, new)), None), new)
    assert same(apply(delta, kept, in_place=True), new)


def test_bits_that_floats_would_hide_are_kept() -> None:
    """-0.0 equals 0.0, a NaN equals nothing, and denormals may count as zero."""
    before = torch.tensor([0.0, -0.0, float("nan"), 1e-45, 1.0])
    after = torch.tensor([-0.0, 0.0, float("nan"), 0.0, 1.0])
    after.view(torch.int32)[2] |= 0x1234  # another payload
    old, new = dict(copied([("w", before)])), dict(copied([("w", after)]))
    delta = encode(old, new)
    assert delta.changed == 4
    rebuilt = as_tensors(apply(delta, old))["w"]
    assert torch.equal(rebuilt.view(torch.int32), after.view(torch.int32))


@pytest.mark.parametrize("name", sorted(DTYPE_OF))
def test_every_dtype_of_torch_goes_there_and_back(name: str) -> None:
    bits = torch.arange(48, dtype=torch.uint8)
    tensor = (bits % 2).bool() if name == "BOOL" else bits.view(DTYPE_OF[name])
    buffers = dict(copied([("t", tensor.reshape(2, -1)), ("scalar", tensor[0])]))
    back = as_tensors(apply(encode(None, buffers), None))
    assert back["t"].dtype == DTYPE_OF[name] and back["scalar"].shape == ()
    assert torch.equal(back["t"].view(torch.uint8).flatten(), tensor.view(torch.uint8).flatten())


def test_a_transposed_tensor_is_read_in_the_order_of_its_elements() -> None:
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3).T
    assert torch.equal(as_tensors(dict(copied([("t", tensor)])))["t"], tensor)


@pytest.mark.parametrize(
    ("share", "mode"), [(0.0, coding.SAME), (0.02, coding.SPARSE), (0.9, coding.XOR), (2.0, coding.FULL)]
)
@pytest.mark.parametrize("size", [5_000, 200_000])  # each mode is tried, and judged by a sample
def test_the_smallest_mode_is_taken(share: float, mode: str, size: int) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, size, dtype=np.uint16)
    new = old ^ ((rng.random(size) < share) * rng.integers(1, 4, size)).astype(np.uint16)
    if mode == coding.FULL:
        new = np.full(size, 7, np.uint16)  # compresses by itself, not as the difference to noise
    coded = coding.code(old, new)
    assert coded.mode == mode
    decoded = coding.decode(coded, old, size, 2)
    assert np.array_equal(old if decoded is None else decoded, new)


@pytest.mark.parametrize("gap", [255, 256, 65_535, 65_536, 300_000])
def test_gaps_of_every_width(gap: int) -> None:
    old = np.zeros(gap + 70_000, np.uint32)
    new = old.copy()
    new[[0, gap, len(new) - 1]] = 5
    decoded = coding.decode(coding.code(old, new), old, len(old), 4)
    assert decoded is not None and np.array_equal(decoded, new)


W = Buffer("BF16", (2,), np.arange(4, dtype=np.uint8))
OTHER = Buffer("F16", (2,), np.arange(4, dtype=np.uint8))


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ({"a": W, "b": W, "c": W}, "Tensor c is new"),
        ({"a": W}, "Tensor b is missing"),
        ({"a": W, "b": OTHER}, r"Tensor b is F16 \[2\] in the new version and was BF16 \[2\]"),
        ({"a": W, "b": Buffer("BF16", (2, 1), W.data)}, r"Tensor b is BF16 \[2, 1\]"),
    ],
)
def test_a_tensor_that_appears_vanishes_or_changes_is_named(new: dict[str, Buffer], said: str) -> None:
    with pytest.raises(DeltaError, match=said):
        encode({"a": W, "b": W}, new)


def test_a_delta_is_refused_by_every_other_version() -> None:
    first, second, third = ({"w": Buffer("U8", (4,), np.full(4, value, np.uint8))} for value in (1, 2, 3))
    step, snapshot = encode(first, second), encode(None, first)
    for base in (second, third, {"v": first["w"]}):
        with pytest.raises(DeltaError, match="starts from the version with the hash"):
            apply(step, base)
    with pytest.raises(DeltaError, match="not a snapshot"):
        apply(step, None)
    with pytest.raises(DeltaError, match="starts from nothing"):
        apply(snapshot, first)


def test_each_byte_of_a_file_that_flips_is_noticed() -> None:
    old = {"w": Buffer("BF16", (300,), np.arange(600, dtype=np.int64).astype(np.uint8))}
    new = {"w": Buffer("BF16", (300,), np.roll(old["w"].data, 8))}
    data = b"".join(file.pack(encode(old, new), {"version": 3}))
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x40
        with pytest.raises(DeltaError):
            file.read(io.BytesIO(broken))
    for length in range(0, len(data), 7):
        with pytest.raises(DeltaError, match="cut off"):
            file.read(io.BytesIO(data[:length]))
    with pytest.raises(DeltaError, match="more bytes"):
        file.read(io.BytesIO(data + b"\0"))


@pytest.mark.parametrize(
    "changes",
    [
        {"changed": 10**9},
        {"width": 3},
        {"width": 4},
        {"mode": "same"},
        {"mode": "xor"},
        {"mode": "full"},
        {"mode": "exec"},
        {"blob": b"no frame"},
        {"blob": b""},
    ],
)
def test_a_delta_that_lies_is_refused_with_its_tensor(changes: dict[str, object]) -> None:
    """With checksums that fit, as a hostile writer would make them."""
    old = {"w": Buffer("U16", (4000,), np.zeros(8000, np.uint8))}
    new = {"w": Buffer("U16", (4000,), np.zeros(8000, np.uint8))}
    new["w"].words[::50] = 9
    honest = encode(old, new)
    part = honest.parts[0]
    lying = part.__class__(part.name, part.dtype, part.shape, part.coded._replace(**changes))
    with pytest.raises(DeltaError):
        data = b"".join(file.pack(Delta(honest.base, honest.result, (lying,)), {}))
        apply(file.read(io.BytesIO(data))[0], old)


def test_a_body_that_no_tensor_needs_is_refused_before_it_is_read() -> None:
    """It may be a hole of terabytes, which is larger than any memory."""
    old = {"w": Buffer("U16", (4,), np.zeros(8, np.uint8))}
    honest = encode(None, old)
    part = honest.parts[0]
    large = part.__class__(part.name, part.dtype, part.shape, part.coded._replace(blob=bytes(1 << 20)))
    data = b"".join(file.pack(Delta(honest.base, honest.result, (large,)), {}))
    with pytest.raises(DeltaError, match="more bytes than its elements need"):
        file.read_header(io.BytesIO(data))


def snapshot_that_claims(nbytes: int) -> Delta:
    """The tensor has zeros only, as far as its header says: a few bytes for all of them."""
    honest = encode(None, {"w": Buffer("U8", (4,), np.zeros(4, np.uint8))})
    [part] = honest.parts
    large = part.__class__("w", "U8", (nbytes,), part.coded._replace(changed=nbytes))
    return Delta(None, honest.result, (large,))


def test_more_than_the_memory_that_is_free_is_not_allocated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:  1 kB\n")
    monkeypatch.setattr(delta_package, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(delta_package, "decode", None)
    with pytest.raises(DeltaError, match=r"its tensors have 1,025 bytes, and 1,024 bytes of memory are free"):
        apply(snapshot_that_claims(1025), None)


def test_memory_that_is_not_there_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(delta_package, "decode", full)
    with pytest.raises(DeltaError, match="no memory for tensor w of 5 bytes"):
        apply(snapshot_that_claims(5), None)


def test_half_of_a_surrogate_pair_is_no_name_of_a_tensor() -> None:
    part = encode(None, {"w": Buffer("U8", (4,), np.zeros(4, np.uint8))}).parts[0]
    data = b"".join(file.pack(Delta(None, "0" * 32, (replace(part, name="w\ud800"),)), {}))
    with pytest.raises(DeltaError, match="its header makes no sense"):
        file.read_header(io.BytesIO(data))


def test_gaps_that_lead_out_of_the_tensor_are_refused() -> None:
    old = {"w": Buffer("U16", (4000,), np.zeros(8000, np.uint8))}
    large = np.zeros(5000, np.uint16)
    large[4500] = 1
    coded = coding.code(np.zeros(5000, np.uint16), large)
    part = encode(old, old).parts[0]
    lying = part.__class__("w", "U16", (4000,), coded._replace(mode="sparse"))
    with pytest.raises(DeltaError, match="Tensor w cannot be rebuilt"):
        apply(Delta(digest(old), digest(old), (lying,)), old)


def test_zstandard_is_needed_only_where_something_is_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/collect_wheels.sh` leaves it out."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    spec = importlib.util.spec_from_file_location("coding_again", coding.__file__)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    with pytest.raises(ImportError):
        coding.code(None, np.zeros(3, np.uint32))
