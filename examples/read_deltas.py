"""A version that `--delta-every` kept, without Async-GRPO: python read_deltas.py CHAIN_FOLDER VERSION"""

import json
import sys
from pathlib import Path

import numpy as np
import xxhash
import zstandard
from safetensors import safe_open


def planes(raw, item):  # bytes of significance 0, then 1, … -> integers
    return np.array(np.frombuffer(raw, np.uint8).reshape(item, -1).T, order="C").reshape(-1).view(f"<u{item}")


def rebuild(folder, version):
    tensors = json.loads((folder / "chain.json").read_text())["tensors"]
    path = next(folder / name for name in (f"{version:06d}.full", f"{version:06d}.delta") if (folder / name).exists())
    with safe_open(path, "np") as file:
        header = json.loads(file.metadata()["delta"])  # docs/deltas.md says how to check the checksum as well
        frames = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    zeros = {name: np.zeros(kind["shape"], f"<u{kind['item']}") for name, kind in tensors.items()}
    words = zeros if header["base"] is None else rebuild(folder, header["before"])
    for name, frame in frames.items():
        flat, raw = words[name].reshape(-1), zstandard.decompress(frame)
        n = len(raw) // (4 + flat.itemsize)  # changes, unless the frame has all words
        where = slice(None) if len(raw) == flat.nbytes else np.cumsum(planes(raw[: 4 * n], 4))
        flat[where] ^= planes(raw if len(raw) == flat.nbytes else raw[4 * n :], flat.itemsize)
    kinds = {name: f"{name}\0{w.itemsize}\0{','.join(map(str, w.shape))}\0".encode() for name, w in words.items()}
    found = xxhash.xxh3_128(b"".join(kinds[name] + words[name].tobytes() for name in sorted(words))).hexdigest()
    assert found == header["result"], f"{path} is damaged"
    return words


if __name__ == "__main__":
    print({name: array.shape for name, array in rebuild(Path(sys.argv[1]), int(sys.argv[2])).items()})
