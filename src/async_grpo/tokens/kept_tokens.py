"""The tokens that truncated sampling (`top_p`, `top_k`, `min_p`) kept for each sampled token, in few bytes.

A queue file has them as one zstandard frame of unsigned LEB128 numbers: for each token of the group the size of its
set, 0 where nobody said which tokens were kept; then for each set the others beside the sampled token, in ascending
order, the first as it is, each further one as the number of ids that it skips. The sampled token is in every set, so
it is not stored: where one token was kept, which is often so, its set costs a part of one byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from async_grpo.errors import BadFileError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_BYTES = 1 << 25  # of a group's numbers before compression; a file with more is refused before it is unfolded
_MOST_ID = (1 << 31) - 1
_LONGEST = 5  # bytes of a number

Kept = bytes
"""Ids of the tokens that were kept at one position, the sampled one among them: int32, ascending. Empty: not known."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The sets of N tokens, back to back."""

    sizes: NDArray[np.int32]  # [N]; 0: not known
    ids: NDArray[np.int32]  # [sum(sizes)]; in each set the sampled token first, then the others, ascending


def pack(kept: Sequence[Kept], completion_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    """The sets of a group's tokens, as its file has them.

    Raises:
        ValueError: a set lacks the sampled token or is not in ascending order, or they are too large together.
    """
    import numpy as np
    import zstandard

    sizes = np.fromiter((len(each) // 4 for each in kept), np.int64, len(kept))
    if len(sizes) != len(completion_ids):
        raise ValueError(f"there are {len(sizes)} sets of kept tokens for {len(completion_ids)} tokens")
    ids = np.frombuffer(b"".join(kept), np.int32).astype(np.int64)
    is_sampled = ids == np.repeat(completion_ids, sizes)
    if (np.bincount(np.repeat(np.arange(len(sizes)), sizes)[is_sampled], minlength=len(sizes)) != (sizes > 0)).any():
        raise ValueError("a sampled token is not among the tokens that the sampler says it kept")
    others, counts = ids[~is_sampled], np.maximum(sizes - 1, 0)
    gaps = np.diff(others, prepend=0) - 1
    firsts = _starts(counts)
    gaps[firsts] = others[firsts]
    if (gaps < 0).any():
        raise ValueError("kept tokens are not in ascending order")
    numbers = _encoded(np.concatenate([sizes, gaps]))
    if len(numbers) > MOST_BYTES:
        raise ValueError(
            f"the tokens that its sampling kept take {len(numbers):,} bytes, and {MOST_BYTES:,} is the limit. Set a "
            "smaller top_k or top_p, or make completions shorter"
        )
    return np.frombuffer(zstandard.ZstdCompressor().compress(numbers.tobytes()), np.uint8)


def unpack(packed: NDArray[np.uint8], completion_ids: NDArray[np.int32]) -> KeptTokens:
    """The sets of a group's tokens. `BadFileError` says what is wrong with them."""
    import numpy as np

    numbers = _decoded(np.frombuffer(_decompressed(packed.tobytes()), np.uint8))
    tokens = len(completion_ids)
    sizes, gaps = numbers[:tokens], numbers[tokens:]
    counts = np.maximum(sizes - 1, 0)
    if len(sizes) != tokens or counts.sum() != len(gaps):
        _bad(f"they are {len(numbers):,} numbers, which do not fit {tokens:,} tokens")
    steps = np.cumsum(gaps + 1)
    before = np.concatenate([[0], steps])[np.cumsum(counts) - counts]  # of the sets before each
    others = steps - np.repeat(before, counts) - 1
    if others.max(initial=0) > _MOST_ID:
        _bad("one of them is no token")
    if (others == np.repeat(completion_ids, counts)).any():
        _bad("one of them is the sampled token again")
    ids = np.empty(len(others) + int((sizes > 0).sum()), np.int32)
    is_sampled = np.zeros(len(ids), np.bool_)
    is_sampled[_starts(sizes)] = True
    ids[is_sampled], ids[~is_sampled] = completion_ids[sizes > 0], others
    return KeptTokens(sizes.astype(np.int32), ids)


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each set that is not empty begins."""
    return ((sizes.cumsum() - sizes)[sizes > 0]).astype(sizes.dtype)


def _encoded(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    import numpy as np

    lengths = np.ones(len(numbers), np.int64)
    for byte in range(1, _LONGEST):
        lengths += numbers >= 1 << 7 * byte
    starts = lengths.cumsum() - lengths
    stream = np.empty(int(lengths.sum()), np.uint8)
    for byte in range(_LONGEST):
        there = lengths > byte
        bits = numbers[there] >> 7 * byte & 127
        stream[starts[there] + byte] = bits | (lengths[there] > byte + 1) << 7
    return stream


def _decoded(stream: NDArray[np.uint8]) -> NDArray[np.int64]:
    import numpy as np

    ends = np.flatnonzero(stream < 128)
    if len(stream) and (not len(ends) or ends[-1] != len(stream) - 1):
        _bad("the last number is cut")
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - starts + 1
    if lengths.max(initial=0) > _LONGEST:
        _bad("a number is too large")
    numbers = np.zeros(len(ends), np.int64)
    for byte in range(_LONGEST):
        there = lengths > byte
        numbers[there] |= (stream[starts[there] + byte].astype(np.int64) & 127) << 7 * byte
    return numbers


def _decompressed(frame: bytes) -> bytes:
    import zstandard

    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > MOST_BYTES:  # also where the frame does not say its size
            _bad(f"they would unfold to {size:,} bytes, over the limit of {MOST_BYTES:,}")
        unfolded: bytes = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        _bad(f"they cannot be decompressed ({error})")
    return unfolded


def _bad(reason: str) -> NoReturn:
    raise BadFileError(f"its kept tokens are not sound: {reason}")
