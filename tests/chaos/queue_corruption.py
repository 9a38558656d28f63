"""Corrupt files of eight kinds: none may be accepted with wrong content, each refusal must name its reason.

Prints a summary as JSON. The files are read as the queue reads them: through `OsFiles`, from a directory.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from crc32c import crc32c
from queue_harness import RUN, arguments, digest, make_group, make_job
from safetensors.numpy import save

from async_grpo.errors import BadFileError
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job
from async_grpo.queue.filesystem import OsFiles
from async_grpo.queue.names import COMPLETE, PENDING, JobName

Dice = random.Random


class Bomb:
    """Unpickling it would be noticed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('a bomb file was unpickled')",))


def truncated(data: bytes, dice: Dice) -> bytes:
    return data[: dice.randrange(len(data))]


def extended(data: bytes, dice: Dice) -> bytes:
    return data + dice.randbytes(dice.randint(1, 64))


def flipped_bits(data: bytes, dice: Dice) -> bytes:
    damaged = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


def zeroed_range(data: bytes, dice: Dice) -> bytes:
    begin = dice.randrange(len(data))
    end = min(len(data), begin + dice.choice([1, 16, 512, 4096]))
    return data[:begin] + bytes(end - begin) + data[end:]


def moved_block(data: bytes, dice: Dice) -> bytes:
    size = dice.choice([4, 16, 32])
    one, other = (dice.randrange(len(data) - size) for _ in range(2))
    damaged = bytearray(data)
    damaged[one : one + size], damaged[other : other + size] = data[other : other + size], data[one : one + size]
    return bytes(damaged)


def foreign(data: bytes, dice: Dice) -> bytes:
    """Well-made files that are not this one: another job, run, attempt, worker, kind, or no queue file at all."""
    other = make_job(dice.randint(2, 99))
    return dice.choice(
        [
            encode_job(other),
            encode_group(make_group(other, 0, "dev1")),
            encode_group(make_group(make_job(1), 1, "dev1")),
            encode_group(make_group(make_job(1), 0, "dev2")),
            save({"completion_ids": np.arange(dice.randint(1, 99), dtype=np.int32)}, {"format": "pt"}),
            save({}, {}),
            b"PK\x03\x04" + dice.randbytes(200),
        ]
    )


def hostile(data: bytes, dice: Dice) -> bytes:
    """Bombs: pickles, a header of 2^63 bytes, deep JSON, huge shapes, a checksum that fits."""
    deep = b"[" * 100_000
    huge = _packed(data, lambda top: top["completion_ids"].update(shape=[1 << 62]) if len(top) > 1 else top.clear())
    return dice.choice(
        [
            pickle.dumps(Bomb()),
            (1 << 63).to_bytes(8, "little") + data[8:],
            len(deep).to_bytes(8, "little") + deep,
            huge,
            dice.randbytes(dice.randint(0, 300)),
        ]
    )


def wrong_schema(data: bytes, dice: Dice) -> bytes:
    """The checksum is right, the content is not that of a queue file."""
    header_changes: list[Callable[[dict[str, Any]], object]] = [
        lambda header: header.update(extra=1),
        lambda header: header.pop(dice.choice(sorted(header))),
        lambda header: header.update({dice.choice(sorted(header)): None}),
        lambda header: header.get("job", header).update(seq=2),
        lambda header: header.get("job", header).update(seq=True),
        lambda header: header.get("job", header).update(run_id="other"),
        lambda header: header.get("job", header).update(row=["not", "a", "row"]),
        lambda header: header.get("job", header).update(num_generations=0),
    ]
    tensor_changes: list[Callable[[dict[str, Any]], object]] = [
        lambda top: top.update(format=1),
        lambda top: [about.update(dtype="F64") for name, about in top.items() if name == "rewards"] or top.clear(),
        lambda top: [about.update(shape=[-1]) for name, about in top.items() if name == "texts"] or top.clear(),
        lambda top: [top.pop("rewards", None), top.update(evil={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})],
    ]
    if dice.random() < 0.5:
        return _packed(data, dice.choice(tensor_changes))
    return _packed(data, lambda top: None, dice.choice(header_changes))


def _packed(
    data: bytes,
    change_top: Callable[[dict[str, Any]], object],
    change_header: Callable[[dict[str, Any]], object] = lambda header: None,
) -> bytes:
    """Change a file and make its checksum fit, as a hostile writer would."""
    start = 8 + int.from_bytes(data[:8], "little")
    top = json.loads(data[8:start])
    metadata = top.pop("__metadata__")
    header = json.loads(metadata["header"])
    change_top(top)
    change_header(header)
    metadata.update(header=json.dumps(header))
    packed = json.dumps({"__metadata__": metadata, **top}).encode()
    whole = bytearray(len(packed).to_bytes(8, "little") + packed + data[start:])
    at = whole.index(b'"crc32c": "') + len(b'"crc32c": "')
    whole[at : at + 8] = b"%08x" % crc32c(whole[at + 8 :], crc32c(whole[:at]))
    return bytes(whole)


KINDS = (truncated, extended, flipped_bits, zeroed_range, moved_block, foreign, hostile, wrong_schema)


def read(files: OsFiles, path: str, kind: str) -> str:
    """What the file says, as the server or a worker would read it."""
    data = files.read(path)
    if kind == "job":
        return repr(decode_job(data, JobName(1, 0, PENDING), RUN))
    return digest(decode_group(data, JobName(1, 0, COMPLETE, "dev1"), RUN))


def main() -> None:
    options = arguments(count=1600)
    dice = Dice(options.seed)
    files = OsFiles(options.root)
    sources = {"job": encode_job(make_job(1)), "group": encode_group(make_group(make_job(1), 0, "dev1"))}
    truth = {"job": repr(make_job(1)), "group": digest(make_group(make_job(1), 0, "dev1"))}
    outcome: Counter[str] = Counter()
    for number in range(options.count):
        damage, kind = KINDS[number % len(KINDS)], dice.choice(sorted(sources))
        data = sources[kind]
        while data == sources[kind]:  # e.g. two equal blocks were swapped
            data = damage(sources[kind], dice)
        (options.root / "file").write_bytes(data)
        try:
            said = read(files, "file", kind)
        except BadFileError as error:
            assert len(str(error)) > 10, f"{damage.__name__}: no reason given"
            outcome["refused"] += 1
            continue
        if said == truth[kind]:
            outcome["harmless"] += 1
        else:
            outcome["accepted"] += 1
            print(f"{damage.__name__} of a {kind} was accepted", file=sys.stderr)
    print(json.dumps({"files": options.count, "kinds": len(KINDS), "accepted": 0, **outcome}))
    sys.exit(1 if outcome["accepted"] else 0)


if __name__ == "__main__":
    main()
