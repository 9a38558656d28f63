"""Named buffers: the bytes of tensors, whatever their dtype. Nothing here compares floats, and nothing needs torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from async_grpo_ipc.errors import DeltaError

Bytes = NDArray[np.uint8]

ITEM_BYTES = {  # by the names that safetensors gives the dtypes
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor: `data` holds its elements in C order, little-endian, as flat bytes."""

    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    data: Bytes

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise DeltaError(f"dtype {self.dtype} is not known. Known are {', '.join(ITEM_BYTES)}.")
        if self.data.dtype != np.uint8 or self.data.shape != (self.nbytes,):
            raise DeltaError(f"{self.data.size} bytes cannot be a tensor of {self.dtype} {list(self.shape)}.")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def words(self) -> NDArray[Any]:
        """The elements as unsigned integers of their size."""
        return self.data.view(f"<u{ITEM_BYTES[self.dtype]}")

    @property
    def kind(self) -> str:
        """`BF16 [128, 64]`, for messages."""
        return f"{self.dtype} {list(self.shape)}"

    def copy(self) -> Buffer:
        return Buffer(self.dtype, self.shape, self.data.copy())


Buffers = Mapping[str, Buffer]


def digest(buffers: Buffers) -> str:
    """xxh3-128 of the names, dtypes, shapes and bytes, in the order of the names; 32 hexadecimal digits."""
    return digest_of((name, buffers[name]) for name in sorted(buffers))


def digest_of(buffers: Iterable[tuple[str, Buffer]]) -> str:
    """The same of buffers that come one after another, in the order of their names."""
    found = xxhash.xxh3_128()
    for name, buffer in buffers:
        found.update(f"{name}\0{buffer.dtype}\0{','.join(map(str, buffer.shape))}\0".encode())
        found.update(buffer.data.data)
    return found.hexdigest()
