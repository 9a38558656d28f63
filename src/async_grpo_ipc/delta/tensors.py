"""Buffers of torch's tensors, and back. Only this module of the package needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from async_grpo_ipc.delta.buffers import ITEM_BYTES, Buffer, Bytes
from async_grpo_ipc.errors import DeltaError
from async_grpo_ipc.fields import CANARY_BYTES
from async_grpo_ipc.layout import Layout

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
NAME_OF = {getattr(torch, torch_name): name for torch_name, name in _NAMES.items() if hasattr(torch, torch_name)}
DTYPE_OF = {name: dtype for dtype, name in NAME_OF.items()}


def require_known(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise `DeltaError` where a tensor cannot be in a delta."""
    for name, tensor in tensors:
        if tensor.dtype not in NAME_OF:
            raise DeltaError(f"Tensor {name} is {tensor.dtype}; deltas know {', '.join(ITEM_BYTES)}.")


def copied(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Buffer]]:
    """Copies of tensors of known dtypes on any device, as buffers that share no memory with them."""
    for name, tensor in tensors:
        own = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        own.copy_(tensor.detach())
        yield name, as_buffer(own)


def as_buffer(tensor: Tensor) -> Buffer:
    """A buffer that shares the memory of a contiguous tensor of the host."""
    return Buffer(NAME_OF[tensor.dtype], tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy())


def as_stored(payload: Bytes, layout: Layout) -> dict[str, Buffer]:
    """Buffers that share the memory of a block: each tensor's bytes in the order in which they lie there.

    Args:
        payload: of the block, all but its canary.
    """
    found = {}
    for spec in layout.tensors:
        start = spec.offset - CANARY_BYTES
        found[spec.name] = Buffer(NAME_OF[spec.dtype], spec.shape, payload[start : start + spec.nbytes])
    return found


def as_tensor(buffer: Buffer) -> Tensor:
    """A tensor that shares the buffer's memory."""
    return torch.from_numpy(buffer.data).view(DTYPE_OF[buffer.dtype]).reshape(buffer.shape)


def as_tensors(buffers: Mapping[str, Buffer]) -> dict[str, Tensor]:
    return {name: as_tensor(buffer) for name, buffer in buffers.items()}
