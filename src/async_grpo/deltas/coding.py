"""The change of one tensor as one zstandard frame: `code`, and `change`, which applies it.

A tensor is an array of n unsigned words, one an element. Floats are never compared, so -0.0, NaN payloads and denormals
are kept. `planes` of an array are its bytes of significance 0, then those of significance 1, and so on: neighbours are
then alike, and zstandard finds that. A frame holds one of these:

    all       planes of old XOR new, all n words
    changed   planes of the gaps as u32 (the first index, then the distance to each next one), then planes of old XOR
              new at these indices

It holds `changed` where that has fewer bytes, so the length of what is in a frame says which of both it is. Level 1, as
higher levels are slower and no smaller here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from async_grpo.errors import AsyncGRPOError

_GAP = np.dtype("<u4")
_PIECE = 1 << 16  # words that are looked at together: they stay in the processor's cache

Words = NDArray[Any]
Bytes = NDArray[np.uint8]
Frame = bytes | memoryview


class DeltaError(AsyncGRPOError):
    """A delta does not fit the version it is applied to, or is not what it says."""


def code(old: Words | None, new: Words) -> bytes:
    """The frame that leads from `old` to `new`, without `old` from zeros. Empty where nothing changes."""
    new = new.reshape(-1)
    xor = new if old is None else old.reshape(-1) ^ new
    pieces = [(at, xor[at : at + _PIECE]) for at in range(0, len(xor), _PIECE)]
    changed = sum(int(np.count_nonzero(piece != 0)) for _, piece in pieces)
    if not changed:
        return b""
    if changed * (_GAP.itemsize + xor.itemsize) >= xor.nbytes or len(xor) > np.iinfo(_GAP).max:
        return _compress(xor)
    indices = np.concatenate([at + np.flatnonzero(piece != 0).astype(_GAP) for at, piece in pieces])
    return _compress(np.diff(indices, prepend=_GAP.type(0)), xor[indices])


def change(words: Words, frame: Frame) -> None:
    """Apply a frame to the old words, in place. `DeltaError` gives the reason where it is none of theirs."""
    words = words.reshape(-1)
    raw = _decompress(frame, words.nbytes)
    if len(raw) == words.nbytes:
        words ^= _from_planes(raw, words.dtype)
        return
    count, rest = divmod(len(raw), _GAP.itemsize + words.itemsize)
    if rest:
        raise DeltaError(f"its data has {len(raw):,} bytes, which is no number of changes")
    indices = np.cumsum(_from_planes(raw[: count * _GAP.itemsize], _GAP), dtype=np.int64)
    if count and indices[-1] >= len(words):
        raise DeltaError(f"it changes element {indices[-1]:,} of {len(words):,}")
    words[indices] ^= _from_planes(raw[count * _GAP.itemsize :], words.dtype)


def _from_planes(planes: Bytes, dtype: np.dtype[Any]) -> Words:
    parts = enumerate(planes.reshape(dtype.itemsize, -1))
    return sum((part.astype(dtype) << dtype.type(8 * byte) for byte, part in parts), start=np.zeros(1, dtype))


def _compress(*arrays: Words) -> bytes:
    """The planes of some arrays, one after another: there is never a copy of all."""
    frame = zstandard.ZstdCompressor(level=1).compressobj(size=sum(array.nbytes for array in arrays))
    planes = (array.view("u1")[byte :: array.itemsize] for array in arrays for byte in range(array.itemsize))
    return b"".join([*(frame.compress(np.ascontiguousarray(plane).data) for plane in planes), frame.flush()])


def _decompress(frame: Frame, at_most: int) -> Bytes:
    try:
        nbytes = zstandard.get_frame_parameters(frame).content_size
        if nbytes > at_most:
            raise DeltaError(f"its data has {nbytes:,} bytes, more than the {at_most:,} of the tensor")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False), np.uint8)
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        raise DeltaError(f"its data cannot be decompressed ({error})") from error
