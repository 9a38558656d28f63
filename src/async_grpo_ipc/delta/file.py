"""A delta as a file: `pack` and `read`. Nothing is unpickled; each byte is under a checksum.

     0  8s   b"AGDELTA1"
     8  u32  n, bytes of the header
    12  u32  CRC-32C of bytes 0..11 and of the header
    16       the header: JSON, n bytes
    16 + n   the body: the zstandard frames of the tensors that have one, in the header's order

The header is `{"about": {...}, "base": hash or null, "result": hash, "body": [bytes, CRC-32C], "tensors":
[[name, dtype, shape, mode, changed, width, bytes], ...]}`. Integers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from crc32c import crc32c

from async_grpo_ipc.delta import Delta, Part
from async_grpo_ipc.delta.buffers import ITEM_BYTES
from async_grpo_ipc.delta.coding import FULL, SAME, SPARSE, XOR, Coded
from async_grpo_ipc.errors import DeltaError

MAGIC = b"AGDELTA1"
MAX_HEADER_BYTES = 256 << 20  # some 150 bytes a tensor
_START = struct.Struct("<8sI")
_CRC = struct.Struct("<I")
_BODY_AT = _START.size + _CRC.size
_HEX = set("0123456789abcdef")


class DeltaHeader(NamedTuple):
    """What a file says of itself, without its body: of `parts`, the blobs are empty."""

    about: dict[str, Any]
    delta: Delta
    body_bytes: int
    body_crc: int
    blob_bytes: tuple[int, ...]
    start: int  # of the body, in the file

    @property
    def file_bytes(self) -> int:
        return self.start + self.body_bytes


def pack(delta: Delta, about: dict[str, Any]) -> Iterator[bytes]:
    """The bytes of the file, in pieces."""
    crc = 0
    for part in delta.parts:
        crc = crc32c(part.coded.blob, crc)
    tensors = [[part.name, part.dtype, part.shape, *part.coded[:3], len(part.coded.blob)] for part in delta.parts]
    body = [sum(len(part.coded.blob) for part in delta.parts), crc]
    header = {"about": about, "base": delta.base, "result": delta.result, "body": body, "tensors": tensors}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    start = _START.pack(MAGIC, len(text))
    yield start + _CRC.pack(crc32c(text, crc32c(start))) + text
    for part in delta.parts:
        yield part.coded.blob


def read_header(file: BinaryIO) -> DeltaHeader:
    """The header alone. Raises `DeltaError` with the reason where it cannot be used."""
    start = file.read(_START.size)
    crc = file.read(_CRC.size)
    if len(start) < _START.size or len(crc) < _CRC.size:
        raise DeltaError("it is cut off in its first bytes")
    magic, length = _START.unpack(start)
    if magic != MAGIC or length > MAX_HEADER_BYTES:
        raise DeltaError("it is not a delta, or its first bytes are damaged")
    text = file.read(length)
    if len(text) < length:
        raise DeltaError("it is cut off in its header")
    if _CRC.unpack(crc)[0] != crc32c(text, crc32c(start)):
        raise DeltaError("its header is damaged: the checksum differs")
    try:
        return _header(json.loads(text), _BODY_AT + length)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DeltaError(f"its header makes no sense ({error!r})") from error


def read(file: BinaryIO) -> tuple[Delta, dict[str, Any]]:
    """The delta, and what the writer said about it. Raises `DeltaError` with the reason where it cannot be used."""
    header = read_header(file)
    try:
        body = file.read(header.body_bytes)
    except MemoryError as error:
        raise DeltaError(f"it has {header.body_bytes:,} bytes, and there is not so much memory") from error
    if len(body) < header.body_bytes:
        raise DeltaError(f"it is cut off: {header.body_bytes - len(body):,} bytes are missing")
    if crc32c(body) != header.body_crc:
        raise DeltaError("its body is damaged: the checksum differs")
    if file.read(1):
        raise DeltaError("it has more bytes than its header says")
    parts, at = [], 0
    for part, nbytes in zip(header.delta.parts, header.blob_bytes, strict=True):
        parts.append(Part(part.name, part.dtype, part.shape, part.coded._replace(blob=body[at : at + nbytes])))
        at += nbytes
    return Delta(header.delta.base, header.delta.result, tuple(parts)), header.about


def _header(found: dict[str, Any], start: int) -> DeltaHeader:
    about, base, result = found["about"], found["base"], found["result"]
    body_bytes, body_crc = map(_natural, found["body"])
    rows = found["tensors"]
    parts = tuple(_part(row) for row in rows)
    blobs = tuple(_natural(row[6]) for row in rows)
    if not isinstance(about, dict) or sum(blobs) != body_bytes or len({part.name for part in parts}) != len(parts):
        raise ValueError("parts that contradict each other")
    return DeltaHeader(
        about, Delta(None if base is None else _hash(base), _hash(result), parts), body_bytes, body_crc, blobs, start
    )


def _part(row: list[Any]) -> Part:
    name, dtype, shape, mode, changed, width, nbytes = row
    if not isinstance(name, str) or dtype not in ITEM_BYTES or mode not in (SAME, SPARSE, XOR, FULL):
        raise ValueError(f"tensor {name!r} of {dtype!r}, {mode!r}")
    name.encode()  # JSON can hold half of a surrogate pair, which no text is; `ValueError`
    coded = Coded(mode, _natural(changed), _natural(width), b"")
    part = Part(name, dtype, tuple(map(_natural, shape)), coded)
    if coded.changed > part.size:
        raise ValueError(f"tensor {name!r} with more changes than elements")
    if _natural(nbytes) > part.most_bytes:
        raise ValueError(f"tensor {name!r} with more bytes than its elements need")
    return part


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r}, where a number is due")
    return value


def _hash(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 32 or not _HEX.issuperset(value):
        raise ValueError(f"{value!r}, where a hash is due")
    return value
