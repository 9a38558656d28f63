"""Eight ways to damage a file of the queue: none may be accepted with wrong content, and each refusal has a reason."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from crc32c import crc32c
from queue_harness import RUN, digest, make_group, make_job
from safetensors.numpy import save

from async_grpo.errors import BadFileError
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job
from async_grpo.queue.filesystem import OsFiles
from async_grpo.queue.names import COMPLETE, PENDING, JobName
from async_grpo.records import RolloutGroup


class Bomb:
    """Unpickling it would be noticed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('a bomb file was unpickled')",))


def truncated(data: bytes, dice: Random) -> bytes:
    return data[: dice.randrange(len(data))]


def extended(data: bytes, dice: Random) -> bytes:
    return data + dice.randbytes(dice.randint(1, 64))


def flipped_bits(data: bytes, dice: Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


def zeroed_range(data: bytes, dice: Random) -> bytes:
    begin = dice.randrange(len(data))
    end = min(len(data), begin + dice.choice([1, 16, 512, 4096]))
    return data[:begin] + bytes(end - begin) + data[end:]


def moved_block(data: bytes, dice: Random) -> bytes:
    size = dice.choice([4, 16, 32])
    one, other = (dice.randrange(len(data) - size) for _ in range(2))
    damaged = bytearray(data)
    damaged[one : one + size], damaged[other : other + size] = data[other : other + size], data[one : one + size]
    return bytes(damaged)


def foreign(data: bytes, dice: Random) -> bytes:
    """Well-made files that are not this one: another job, run, attempt, worker, kind, or no queue file at all."""
    other = make_job(dice.randint(90, 99))
    return dice.choice(
        [
            encode_job(other),
            encode_group(make_group(other, 0, "dev1")),
            encode_group(make_group(make_job(1), 77, "dev1")),
            encode_group(make_group(make_job(1), 0, "dev77")),
            save({"completion_ids": np.arange(dice.randint(1, 99), dtype=np.int32)}, {"format": "pt"}),
            save({}, {}),
            b"PK\x03\x04" + dice.randbytes(200),
        ]
    )


def hostile(data: bytes, dice: Random) -> bytes:
    """Bombs: pickles, a header of 2^63 bytes, deep JSON."""
    deep, noise = b"[" * 100_000, dice.randbytes(dice.randint(0, 300))
    huge, nested = (1 << 63).to_bytes(8, "little") + data[8:], len(deep).to_bytes(8, "little") + deep
    return dice.choice([pickle.dumps(Bomb()), huge, nested, noise])


def wrong_schema(data: bytes, dice: Random) -> bytes:
    """The checksum is right, the header is not that of this file. `tests/fuzz` makes many more of these."""
    start = 8 + int.from_bytes(data[:8], "little")
    top = json.loads(data[8:start])
    header = json.loads(top["__metadata__"]["header"])
    changes = [{"seq": 77}, {"seq": True}, {"run_id": "other"}, {"row": ["no", "row"]}, {"num_generations": 0}]
    header.get("job", header).update(dice.choice([*changes, {"extra": 1}, {dice.choice(list(header)): None}]))
    top["__metadata__"]["header"] = json.dumps(header)
    packed = json.dumps(top).encode()
    whole = bytearray(len(packed).to_bytes(8, "little") + packed + data[start:])
    at = whole.index(b'"crc32c": "') + len(b'"crc32c": "')
    whole[at : at + 8] = b"%08x" % crc32c(whole[at + 8 :], crc32c(whole[:at]))
    return bytes(whole)


KINDS: dict[str, Callable[[bytes, Random], bytes]] = {
    kind.__name__: kind
    for kind in (truncated, extended, flipped_bits, zeroed_range, moved_block, foreign, hostile, wrong_schema)
}


def read_damaged_files(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Read `count` damaged files as the queue does, through `OsFiles`, from a directory."""
    dice, files = Random(seed), OsFiles(folder)
    job, group = make_job(1), make_group(make_job(1), 0, "dev1")
    sound = [(encode_job(job), _job, repr(job)), (encode_group(group), _group, _said(group))]
    outcome = Counter(files=count, kinds=len(KINDS), accepted=0)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        data, read, truth = dice.choice(sound)
        while (damaged := KINDS[kind](data, dice)) == data:  # e.g. two equal blocks were swapped
            pass
        (folder / "file").write_bytes(damaged)
        try:
            said = read(files.read("file"))
        except BadFileError as error:
            assert len(str(error)) > 10, f"{kind}: no reason given"
            outcome["refused"] += 1
        else:
            assert said == truth, f"{kind} of a {read.__name__} was accepted"
            outcome["harmless"] += 1
    return dict(outcome)


def _job(data: bytearray) -> str:
    return repr(decode_job(data, JobName(1, 0, PENDING), RUN))


def _group(data: bytearray) -> str:
    return _said(decode_group(data, JobName(1, 0, COMPLETE, "dev1"), RUN))


def _said(group: RolloutGroup) -> str:
    return f"{digest(group)} {group.attempt} {group.worker}"
