"""Where each tensor lies in a block of memory: dtype buckets, every tensor at a multiple of 256 bytes."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_grpo_ipc.fields import ALIGNMENT as ALIGNMENT
from async_grpo_ipc.fields import MAX_INTEGER, integer, text

MAX_DIMENSIONS = 64  # more have no use, and torch refuses them


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's position in its block. Shape and stride count elements, `offset` counts bytes from the
    block's start.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """The part of a block that has the tensors of one dtype."""

    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one block, bucket by bucket. `nbytes` is the whole block, `start` bytes before the first
    bucket included.
    """

    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    nbytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors alone, without padding."""
        return sum(spec.nbytes for spec in self.tensors)


def plan_layout(tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None, start: int = 0) -> Layout:
    """Place `tensors` in order, one bucket a dtype. Floating-point ones are stored as `dtype` where it is given."""
    groups: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        stored_as = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        groups.setdefault(stored_as, []).append((name, tensor))
    specs: list[TensorSpec] = []
    buckets: list[Bucket] = []
    offset = align(start)
    for bucket_dtype, members in groups.items():
        bucket_start = offset
        for name, tensor in members:
            spec = TensorSpec(name, bucket_dtype, tuple(tensor.shape), storable_stride(tensor), offset)
            specs.append(spec)
            offset = align(offset + spec.nbytes)
        buckets.append(Bucket(bucket_dtype, bucket_start, offset - bucket_start))
    return Layout(tuple(specs), tuple(buckets), max(offset, ALIGNMENT))


def views(block: Tensor, specs: Iterable[TensorSpec]) -> dict[str, Tensor]:
    """Zero-copy tensors by name in `block`, which is uint8 [nbytes]."""
    flat: dict[torch.dtype, Tensor] = {}
    result = {}
    for spec in specs:
        if spec.dtype not in flat:
            flat[spec.dtype] = block.view(spec.dtype)
        bucket = flat[spec.dtype]
        start = bucket.storage_offset() + spec.offset // spec.dtype.itemsize
        result[spec.name] = bucket.as_strided(spec.shape, spec.stride, start)
    return result


def storable_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own stride where its elements fill memory without gaps or overlap, else the contiguous one."""
    return tuple(tensor.stride()) if is_dense(tensor.shape, tensor.stride()) else contiguous_stride(tensor.shape)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these elements fill a block of `prod(shape)` elements, each of it once."""
    if math.prod(shape) == 0:
        return list(stride) == list(contiguous_stride(shape))
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def align(offset: int, to: int = ALIGNMENT) -> int:
    return (offset + to - 1) // to * to


def described(layout: Layout) -> dict[str, Any]:
    """The layout as a handle file holds it."""
    return {
        "nbytes": layout.nbytes,
        "buckets": [{"dtype": _name(b.dtype), "offset": b.offset, "nbytes": b.nbytes} for b in layout.buckets],
        "tensors": [
            {
                "name": spec.name,
                "dtype": _name(spec.dtype),
                "shape": list(spec.shape),
                "stride": list(spec.stride),
                "offset": spec.offset,
            }
            for spec in layout.tensors
        ],
    }


def read_layout(body: dict[str, Any]) -> Layout:
    """The layout that a handle file describes. `ValueError`, `TypeError` or `KeyError` says what is wrong with it."""
    nbytes = integer(body["nbytes"])
    specs = tuple(_spec(entry, nbytes) for entry in body["tensors"])
    buckets = tuple(Bucket(_dtype(b["dtype"]), integer(b["offset"]), integer(b["nbytes"])) for b in body["buckets"])
    return Layout(specs, buckets, nbytes)


def _spec(body: dict[str, Any], block_bytes: int) -> TensorSpec:
    shape = tuple(integer(length) for length in body["shape"])
    stride = tuple(integer(step) for step in body["stride"])
    spec = TensorSpec(text(body["name"]), _dtype(body["dtype"]), shape, stride, integer(body["offset"]))
    if len(shape) > MAX_DIMENSIONS or math.prod(max(length, 1) for length in shape) > MAX_INTEGER:
        raise ValueError(f"tensor {spec.name} has an impossible shape")
    if not is_dense(shape, stride):
        raise ValueError(f"tensor {spec.name} has strides {stride}, which leave gaps or overlap")
    if spec.offset % ALIGNMENT or spec.offset + spec.nbytes > block_bytes:
        raise ValueError(f"tensor {spec.name} at offset {spec.offset} of a block of {block_bytes} bytes")
    return spec


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    return _storable_dtype(text(name))


@functools.cache
def _storable_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name[:40]!r}, which this torch does not have")
    try:
        torch.empty(ALIGNMENT, dtype=torch.uint8, device="cpu").view(dtype)
    except RuntimeError as error:
        raise ValueError(f"dtype {name[:40]!r}, in which bytes cannot be seen") from error
    return dtype
