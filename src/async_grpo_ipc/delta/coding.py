"""The change of one tensor as few bytes as it takes: `code`, and `decode`, which is its inverse.

A tensor is an array of n unsigned words, one an element. `planes` of an array are its bytes of significance 0, then
those of significance 1, and so on: neighbours are then alike, and zstandard finds that.

    same     nothing
    sparse   planes of the gaps (the first index, then the distance to each next one), then planes of old XOR new there
    xor      planes of old XOR new, all n words
    full     planes of new

One zstandard frame holds all of it. Level 1, as higher levels are slower and no smaller here. zstandard is imported
with the first frame: a run that keeps no versions does without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_grpo_ipc.errors import DeltaError

SAME, SPARSE, XOR, FULL = "same", "sparse", "xor", "full"
WIDTHS = (1, 2, 4)  # bytes of a gap
_LEVEL = 1
_CHUNK = 1 << 16  # words: old, new and their difference stay in the processor's cache
_TRY_ALL = 1 << 13  # words: up to here each mode is tried
_SAMPLES, _SAMPLE = 8, 1 << 10  # of a larger tensor: so many pieces of so many words
_SURELY_SPARSE = 1 / 16
_NEVER_SPARSE = 2 / 3

Words = NDArray[Any]


class Coded(NamedTuple):
    """How a tensor changed."""

    mode: str
    changed: int  # words that differ; of `full` without an old tensor: all
    width: int  # bytes of a gap; 0 unless sparse
    blob: bytes


class _Changes(NamedTuple):
    gaps: NDArray[np.uint32]
    values: Words


def code(old: Words | None, new: Words) -> Coded:
    """The smallest of the modes; of a large tensor, the one that is the smallest for a sample of it."""
    if old is None:
        return _full(new, len(new))
    changed = _count(old, new)
    if changed == 0:
        return Coded(SAME, 0, 0, b"")
    if len(new) <= _TRY_ALL:
        return _smallest(old, new, changed)
    if changed <= _SURELY_SPARSE * len(new):
        return _sparse(old, new)
    where = np.linspace(0, len(new) - _SAMPLE, _SAMPLES).astype(int)
    sample = np.concatenate([np.arange(start, start + _SAMPLE) for start in where])
    best = _smallest(old[sample], new[sample], _count(old[sample], new[sample])).mode
    return _as(best, old, new, changed)


def decode(coded: Coded, old: Words | None, size: int, item: int) -> Words | None:
    """The new words: None where they are the old ones. `old` is not written to.

    Args:
        size: words of the tensor.
        item: bytes of a word.

    Raises:
        DeltaError: the blob is not what its mode says.
    """
    if coded.mode == SAME:
        return None
    if coded.mode == FULL:
        return _from_planes(_decompress(coded.blob, size * item), item)
    if old is None:
        raise DeltaError(f"it is coded as {coded.mode}, which needs a tensor to start from")
    if coded.mode == XOR:
        words = _from_planes(_decompress(coded.blob, size * item), item)
        np.bitwise_xor(words, old, out=words)
        return words
    new = old.copy()
    change_sparsely(coded, new)
    return new


def change_sparsely(coded: Coded, words: Words) -> None:
    """Apply a sparse change to `words` in place."""
    item, count = words.itemsize, coded.changed
    if coded.mode != SPARSE or coded.width not in WIDTHS or not 0 < count <= len(words):
        raise DeltaError(f"it is coded as {coded.mode} with {count} changes and gaps of {coded.width} bytes")
    raw = _decompress(coded.blob, count * (coded.width + item))
    gaps = _from_planes(raw[: count * coded.width], coded.width)
    indices = np.cumsum(gaps, dtype=np.int64)
    if indices[-1] >= len(words):
        raise DeltaError(f"it changes element {indices[-1]:,} of {len(words):,}")
    words[indices] ^= _from_planes(raw[count * coded.width :], item)


def _smallest(old: Words, new: Words, changed: int) -> Coded:
    modes = (XOR, FULL) if changed > _NEVER_SPARSE * len(new) else (SPARSE, XOR, FULL)
    return min((_as(mode, old, new, changed) for mode in modes), key=lambda coded: len(coded.blob))


def _as(mode: str, old: Words, new: Words, changed: int) -> Coded:
    if mode == SPARSE:
        return _sparse(old, new)
    if mode == FULL:
        return _full(new, changed)
    return Coded(XOR, changed, 0, _compress(_planes(old ^ new)))


def _full(new: Words, changed: int) -> Coded:
    return Coded(FULL, changed, 0, _compress(_planes(new)))


def _sparse(old: Words, new: Words) -> Coded:
    gaps, values = _changes(old, new)
    if not len(gaps):
        return Coded(SPARSE, 0, 1, b"")
    largest = int(gaps.max())
    width = next(width for width in WIDTHS if largest < 1 << 8 * width)
    raw = np.concatenate([_planes(gaps.astype(f"<u{width}")), _planes(values)])
    return Coded(SPARSE, len(gaps), width, _compress(raw))


def _changes(old: Words, new: Words) -> _Changes:
    gaps, values = [], []
    last = 0
    for start in range(0, len(new), _CHUNK):
        xor = old[start : start + _CHUNK] ^ new[start : start + _CHUNK]
        indices = np.flatnonzero(xor != 0)
        if len(indices):
            values.append(xor[indices])
            indices += start
            gaps.append(np.diff(indices, prepend=last).astype(np.uint32))
            last = int(indices[-1])
    if not gaps:
        return _Changes(np.empty(0, np.uint32), new[:0])
    return _Changes(np.concatenate(gaps), np.concatenate(values))


def _count(old: Words, new: Words) -> int:
    pieces = range(0, len(new), _CHUNK)
    return sum(int(np.count_nonzero(old[at : at + _CHUNK] != new[at : at + _CHUNK])) for at in pieces)


def _planes(words: Words) -> NDArray[np.uint8]:
    by_word = words.view(np.uint8).reshape(-1, words.itemsize)
    return np.ascontiguousarray(by_word.T).reshape(-1)


def _from_planes(planes: NDArray[np.uint8], item: int) -> Words:
    by_word = np.array(planes.reshape(item, -1).T, order="C")  # a copy in every case: the caller may write into it
    return by_word.reshape(-1).view(f"<u{item}")


def _compress(raw: NDArray[np.uint8]) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL).compress(raw.data)


def _decompress(blob: bytes, nbytes: int) -> NDArray[np.uint8]:
    import zstandard

    try:
        found = zstandard.get_frame_parameters(blob).content_size
        if found != nbytes:
            raise DeltaError(f"its data has {found:,} bytes instead of {nbytes:,}")
        raw = zstandard.ZstdDecompressor().decompress(blob, max_output_size=nbytes, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        raise DeltaError(f"its data cannot be decompressed ({error})") from error
    return np.frombuffer(raw, np.uint8)
