"""A version that `--delta-every` kept, without Async-GRPO: python read_deltas.py CHAIN_FOLDER VERSION"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import xxhash
import zstandard


def planes(raw, item):  # bytes of significance 0, then 1, … -> integers
    return np.array(np.frombuffer(raw, np.uint8).reshape(item, -1).T, order="C").reshape(-1).view(f"<u{item}")


def rebuild(folder, version):
    path = next(folder / name for name in (f"{version:06d}.full", f"{version:06d}.delta") if (folder / name).exists())
    data = path.read_bytes()
    magic, n, _ = struct.unpack("<8sII", data[:16])  # docs/deltas.md says how to check the CRC-32C as well
    header, at = json.loads(data[16 : 16 + n]), 16 + n
    words = {} if header["base"] is None else rebuild(folder, header["about"]["before"])
    hashed = {}
    for name, dtype, shape, mode, changed, width, size in header["tensors"]:
        item, raw = BYTES[dtype], zstandard.decompress(data[at : at + size]) if size else b""
        if mode == "sparse":
            words[name][np.cumsum(planes(raw[: changed * width], width))] ^= planes(raw[changed * width :], item)
        elif mode != "same":
            words[name] = planes(raw, item) ^ (words[name] if mode == "xor" else np.uint8(0))
        at, hashed[name] = at + size, f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode()
    found = xxhash.xxh3_128(b"".join(hashed[name] + words[name].tobytes() for name in sorted(words))).hexdigest()
    assert magic == b"AGDELTA1" and found == header["result"], f"{path} is damaged"
    return words


BYTES = {**dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1), "BF16": 2, "F16": 2, "F32": 4, "I64": 8}
if __name__ == "__main__":
    print({name: array.shape for name, array in rebuild(Path(sys.argv[1]), int(sys.argv[2])).items()})
