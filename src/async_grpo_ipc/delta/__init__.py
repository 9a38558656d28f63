"""The difference of two versions of named buffers, exact to the bit: `encode(old, new)` and `apply(delta, old)`.

Knows nothing of models or of training. Elements are compared as integers, never as floats: -0.0, NaN payloads and
denormals travel as they are. `buffers` says what a buffer is, `coding` how one tensor is coded, `file` how a delta lies
in a file, and `tensors` makes buffers of torch's tensors. docs/deltas.md has the format for readers in other programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from async_grpo_ipc.delta.buffers import ITEM_BYTES, Buffer, Buffers, digest
from async_grpo_ipc.delta.coding import FULL, SAME, SPARSE, Coded, change_sparsely, code, decode
from async_grpo_ipc.errors import DeltaError

_MEMORY = Path("/proc/meminfo")

__all__ = ["Buffer", "Buffers", "Delta", "DeltaError", "Part", "apply", "digest", "encode"]


@dataclass(frozen=True, slots=True)
class Part:
    """What became of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    coded: Coded

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.size * ITEM_BYTES[self.dtype]

    @property
    def most_bytes(self) -> int:
        """The most bytes of its compressed data: zstandard adds less than a hundredth to what cannot be compressed."""
        raw = self.coded.changed * (self.coded.width + ITEM_BYTES[self.dtype])
        raw = max(raw, self.nbytes) if self.coded.mode != SPARSE else raw
        return raw + raw // 100 + 1024


@dataclass(frozen=True, slots=True)
class Delta:
    """What leads from the buffers with digest `base` to those with digest `result`; a snapshot has no base."""

    base: str | None
    result: str
    parts: tuple[Part, ...]

    @property
    def changed(self) -> int:
        """Elements that differ; of a snapshot, all."""
        return sum(part.coded.changed for part in self.parts)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def encode(old: Buffers | None, new: Buffers, *, base: str | None = None) -> Delta:
    """The difference from `old` to `new`; without `old`, a snapshot.

    Args:
        base: the digest of `old`, where the caller knows it.

    Raises:
        DeltaError: a tensor appears, vanishes, or has another dtype or shape; the message names it.
    """
    if old is not None:
        _require_same_tensors({name: buffer.kind for name, buffer in new.items()}, old, "the new version")
    parts = tuple(
        Part(name, buffer.dtype, buffer.shape, _coded(None if old is None else old[name], buffer))
        for name, buffer in new.items()
    )
    return Delta(None if old is None else base or digest(old), digest(new), parts)


def apply(delta: Delta, base: Buffers | None, *, in_place: bool = False, known: str | None = None) -> dict[str, Buffer]:
    """The buffers that `delta` leads to from `base`. Their digest is what the delta promises, or it raises.

    Args:
        base: None for a snapshot.
        in_place: write into the memory of `base`, which is then the result, or undefined after an error. Otherwise
            nothing of it is written to or shared.
        known: the digest of `base`, where the caller has just made it.

    Raises:
        DeltaError: the delta starts from other buffers, does not lead to what it says, or claims more than there is
            memory for.
    """
    new = {} if base is None else dict(base) if in_place else {name: buffer.copy() for name, buffer in base.items()}
    _require_base(delta, base, known)
    for part in delta.parts:
        try:
            buffer = _applied(part, new.get(part.name))
        except DeltaError as error:
            raise DeltaError(f"Tensor {part.name} cannot be rebuilt: {error}.") from error
        except MemoryError as error:
            raise DeltaError(f"There is no memory for tensor {part.name} of {part.nbytes:,} bytes.") from error
        new[part.name] = buffer
    found = digest(new)
    if found != delta.result:
        raise DeltaError(f"The rebuilt version has the hash {found} instead of {delta.result}: the delta is damaged.")
    return new


def _coded(old: Buffer | None, new: Buffer) -> Coded:
    if old is new:  # what is frozen, in a caller that copies it once
        return Coded(SAME, 0, 0, b"")
    return code(None if old is None else old.words, new.words)


def _applied(part: Part, old: Buffer | None) -> Buffer:
    if part.coded.mode == SPARSE and old is not None:
        change_sparsely(part.coded, old.words)
        return old
    words = decode(part.coded, None if old is None else old.words, part.size, ITEM_BYTES[part.dtype])
    if words is None:
        if old is None:
            raise DeltaError("it is said to be unchanged, but there is nothing before it")
        return old
    data = words.view("u1")
    if old is None:
        return Buffer(part.dtype, part.shape, data)
    old.data[:] = data
    return old


def _require_base(delta: Delta, base: Buffers | None, known: str | None) -> None:
    if base is None:
        if delta.base is not None or any(part.coded.mode != FULL for part in delta.parts):
            raise DeltaError(f"It is a delta from {delta.base}, not a snapshot: give the version that it starts from.")
        _require_memory(sum(part.nbytes for part in delta.parts))
        return
    if delta.base is None:
        raise DeltaError("It is a snapshot, which starts from nothing.")
    found = known or digest(base)
    if found != delta.base:
        raise DeltaError(f"It starts from the version with the hash {delta.base}, and this one has {found}.")
    kinds = {part.name: f"{part.dtype} {list(part.shape)}" for part in delta.parts}
    _require_same_tensors(kinds, base, "the delta")


def _require_memory(needed: int) -> None:
    """A few bytes can claim to be gigabytes: zeros are compressed to nearly nothing."""
    free = next(1024 * int(line.split()[1]) for line in _MEMORY.open() if line.startswith("MemAvailable:"))
    if needed > free:
        raise DeltaError(f"It says that its tensors have {needed:,} bytes, and {free:,} bytes of memory are free.")


def _require_same_tensors(new: dict[str, str], old: Buffers, what: str) -> None:
    for name in old:
        if name not in new:
            raise DeltaError(f"Tensor {name} is missing in {what}: all versions of a chain have the same tensors.")
    for name, kind in new.items():
        if name not in old:
            raise DeltaError(f"Tensor {name} is new in {what}: all versions of a chain have the same tensors.")
        if kind != old[name].kind:
            raise DeltaError(f"Tensor {name} is {kind} in {what} and was {old[name].kind}: it has changed its form.")
