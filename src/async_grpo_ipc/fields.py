"""The fields of a handle file: every one is checked here, before anything relies on it.

`ValueError`, `TypeError` or `KeyError` says what is wrong; `handle` puts the name of the file before it. `layout`
checks the layouts, for which it needs torch.
"""

import math
from typing import Any, NamedTuple

from async_grpo_ipc.control import MAX_SLOTS

MAX_INTEGER = (1 << 63) - 1
CANARY_BYTES = 4096  # at the beginning of each block
ALIGNMENT = 256  # bytes: a cache line, a vector load and every dtype's size divide it


class Head(NamedTuple):
    """What it takes to look at the slots."""

    pid: int
    slots: int
    generation: str
    control_fd: int
    control_inode: int


def head(body: dict[str, Any]) -> Head:
    found = Head(
        pid=integer(body["pid"], at_least=1),
        slots=integer(body["slots"], at_least=1),
        generation=generation(body["generation"]),
        control_fd=integer(body["control"]["fd"]),
        control_inode=integer(body["control"]["inode"]),
    )
    if found.slots > MAX_SLOTS:
        raise ValueError(f"{found.slots} slots, and there can be {MAX_SLOTS}")
    return found


def memory(body: dict[str, Any]) -> dict[str, Any]:
    """What a memory backend described. Blocks lie within the memory, and each is large enough for its canary."""
    kind, blocks = text(body["kind"]), body["blocks"]
    if kind not in ("posix", "cuda"):
        raise ValueError(f"memory of kind {kind[:20]!r}")
    if type(blocks) is not list or not blocks or any(integer(block["nbytes"]) < CANARY_BYTES for block in blocks):
        raise ValueError("no blocks, or one without room for its canary")
    if any(integer(block["nbytes"]) % ALIGNMENT for block in blocks):
        raise ValueError(f"a block whose size is no multiple of {ALIGNMENT}")
    if kind == "posix":
        total = integer(body["nbytes"])
        integer(body["fd"]), integer(body["inode"])
        if any(integer(block["offset"]) + block["nbytes"] > total for block in blocks):
            raise ValueError(f"a block that ends behind {total} bytes")
        if any(block["offset"] % ALIGNMENT for block in blocks):
            raise ValueError(f"a block that begins at no multiple of {ALIGNMENT}")
    else:
        text(body["device_uuid"]), text(body["device_name"])
        if any(len(bytes.fromhex(text(block["handle"]))) != 64 for block in blocks):
            raise ValueError("a CUDA handle that is not 64 bytes")
    return body


def generation(value: Any) -> str:
    if len(text(value)) != 32 or len(bytes.fromhex(value)) != 16:
        raise ValueError(f"generation {value[:40]!r}")
    return str(value)


def integer(value: Any, at_least: int = 0) -> int:
    if type(value) is not int or not at_least <= value <= MAX_INTEGER:
        raise ValueError(f"{_shown(value)} where an integer of at least {at_least} belongs")
    return value


def number(value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    return float(integer(value))


def text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{_shown(value)} where text belongs")
    value.encode()  # half a character is a ValueError
    return value


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{_shown(value)} where true or false belongs")
    return value


def _shown(value: Any) -> str:
    if type(value) in (list, dict):
        return f"a {type(value).__name__}"
    return "a larger integer" if type(value) is int and abs(value) > MAX_INTEGER else f"{value!r:.60}"
