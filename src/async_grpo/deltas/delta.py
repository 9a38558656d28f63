"""The difference of two versions of the weights, exact to the bit, and its file: plain safetensors.

Weights are unsigned words by the name of the tensor, whatever its dtype; `tensors` makes them of torch's tensors. Each
tensor that changed has an entry in the file: the bytes of the zstandard frame that `coding` makes of the change. The
metadata hold `delta`, a `DeltaHeader` as JSON, and `checksum`, xxh3-128 of that JSON and of each frame and its name.
Nothing is unpickled. docs/deltas.md has the format for readers in other programs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open

from async_grpo.deltas.coding import DeltaError, Frame, Words, change, code
from async_grpo.errors import BadFileError
from async_grpo.rundir.reading import parse_object
from async_grpo.rundir.shape import shaped

_MEMORY = Path("/proc/meminfo")

Weights = Mapping[str, Words]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeader:
    """What a delta says about itself."""

    chain: str = ""  # id of the chain that it is part of
    version: int = 0
    before: int | None = None  # the version before it in the chain; a delta starts from it
    base: str | None  # digest of the weights that it starts from; None: a snapshot, which starts from zeros
    result: str  # digest of the weights that it leads to

    @property
    def is_snapshot(self) -> bool:
        return self.base is None

    @property
    def span(self) -> int:
        """Optimizer steps since the version before it."""
        return 1 if self.before is None else self.version - self.before


@dataclass(frozen=True, slots=True)
class Delta:
    """What leads from one version to another."""

    header: DeltaHeader
    frames: Mapping[str, Frame]  # of the tensors that change, as `coding` makes them


def digest(weights: Weights) -> str:
    """xxh3-128 of the names, lengths of a word, shapes and bytes, in the order of the names; hexadecimal."""
    return digest_of((name, weights[name]) for name in sorted(weights))


def digest_of(weights: Iterable[tuple[str, Words]]) -> str:
    """The same of tensors that come one after another, in the order of their names."""
    found = xxhash.xxh3_128()
    for name, words in weights:
        found.update(f"{name}\0{words.itemsize}\0{','.join(map(str, words.shape))}\0".encode())
        found.update(words.reshape(-1).view("u1").data)
    return found.hexdigest()


def encode(old: Weights | None, new: Weights, *, base: str | None = None) -> Delta:
    """The difference from `old` to `new`; without `old`, a snapshot.

    Args:
        base: the digest of `old`, where the caller knows it.

    Raises:
        DeltaError: a tensor appears, vanishes, or has another dtype or shape; the message names it.
    """
    if old is None:
        frames = {name: code(None, words) for name, words in new.items()}
    else:
        _require_same_tensors(old, new)
        base = base or digest(old)  # what is frozen may be the same array
        frames = {name: code(old[name], words) for name, words in new.items() if words is not old[name]}
    header = DeltaHeader(base=None if old is None else base, result=digest(new))
    return Delta(header, {name: frame for name, frame in frames.items() if frame})


def apply(delta: Delta, weights: Weights, *, known: str | None = None) -> None:
    """Make the weights that `delta` starts from those that it leads to, in place. A snapshot starts from zeros.

    Args:
        known: the digest of `weights`, where the caller has just made it.

    Raises:
        DeltaError: the delta starts from other weights, or does not lead to what it says. `weights` are then undefined.
    """
    base = delta.header.base
    if base is not None and (found := known or digest(weights)) != base:
        raise DeltaError(f"It starts from the version with the hash {base}, and this one has {found}.")
    for name, frame in delta.frames.items():
        if name not in weights:
            raise DeltaError(f"It has a tensor {name}, and the chain's model has none of this name.")
        try:
            change(weights[name], frame)
        except DeltaError as error:
            raise DeltaError(f"Tensor {name} cannot be rebuilt: {error}.") from error
    found = digest(weights)
    if found != delta.header.result:
        raise DeltaError(f"The version has the hash {found} instead of {delta.header.result}: the delta is damaged.")


def pack(delta: Delta) -> Iterator[Frame]:
    """The bytes of the file, in pieces."""
    text = json.dumps(asdict(delta.header))
    header: dict[str, object] = {"__metadata__": {"delta": text, "checksum": _checksum(text, delta.frames)}}
    at = 0
    for name, frame in delta.frames.items():
        end = at + len(frame)
        header[name] = {"dtype": "U8", "shape": [end - at], "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    yield len(encoded).to_bytes(8, "little") + encoded
    yield from delta.frames.values()


def read_header(fd: int) -> DeltaHeader:
    """The header alone. `DeltaError` gives the reason where the file cannot be used."""
    return _read(fd, with_frames=False).header


def read(fd: int) -> Delta:
    """The delta in a file, each byte of which is under the checksum. `DeltaError` as `read_header`."""
    require_memory(os.fstat(fd).st_size)
    return _read(fd, with_frames=True)


def require_memory(nbytes: int) -> None:
    """Raise `DeltaError` where less is free: a file may be a hole, and zeros are compressed to nearly nothing."""
    free = next(1024 * int(line.split()[1]) for line in _MEMORY.open() if line.startswith("MemAvailable:"))
    if nbytes > free:
        raise DeltaError(f"it needs {nbytes:,} bytes, and {free:,} bytes of memory are free")


def _read(fd: int, *, with_frames: bool) -> Delta:
    try:
        with safe_open(f"/proc/self/fd/{fd}", "np") as file:
            text, checksum = (file.metadata()[name] for name in ("delta", "checksum"))
            frames = {name: file.get_tensor(name).data for name in file.keys() if with_frames}  # noqa: SIM118 - not a dict
        delta = Delta(shaped(DeltaHeader, parse_object(text)), frames)
    except (SafetensorError, BadFileError, KeyError, TypeError, ValueError, MemoryError) as error:
        raise DeltaError(f"it is not a delta, or it is damaged or cut off ({error})") from error
    if with_frames and _checksum(text, frames) != checksum:
        raise DeltaError("it is damaged: the checksum differs")
    return delta


def _checksum(text: str, frames: Mapping[str, Frame]) -> str:
    found = xxhash.xxh3_128(text.encode())
    for name in sorted(frames):
        found.update(f"\0{name}\0".encode())
        found.update(frames[name])
    return found.hexdigest()


def _require_same_tensors(old: Weights, new: Weights) -> None:
    was, now = ({name: f"{w.dtype} {list(w.shape)}" for name, w in one.items()} for one in (old, new))
    for name in {**was, **now}:
        if (before := was.get(name, "not there")) != (after := now.get(name, "not there")):
            raise DeltaError(f"Tensor {name} was {before} and is {after}: all versions have the same tensors.")
