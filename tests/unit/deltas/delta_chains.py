"""Chains of small versions for the tests: a random walk of a few tensors."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_grpo.deltas.chain import About
from async_grpo.deltas.writer import ChainWriter
from async_grpo_ipc.delta import Buffer, Buffers

ABOUT = About(chain="c" * 32, run_id="run-1")


@lru_cache(maxsize=200)
def values(version: int, seed: int) -> NDArray[np.float32]:
    if version == 0:
        return np.random.default_rng(seed).normal(0, 0.02, 600).astype(np.float32)
    rng = np.random.default_rng([seed, version])
    found = values(version - 1, seed).copy()
    found[rng.integers(0, 600, 40)] += rng.normal(0, 1e-3, 40).astype(np.float32)
    return found


def weights(version: int, *, seed: int = 0) -> dict[str, Buffer]:
    """The weights of `version`: some elements differ from those of the version before."""
    all_of_it = values(version, seed)
    return {
        "model.layers.0.self_attn.q_proj.weight": Buffer("F32", (20, 20), all_of_it[:400].copy().view(np.uint8)),
        "model.layers.1.mlp.up_proj.weight": Buffer("F32", (180,), all_of_it[400:580].copy().view(np.uint8)),
        "model.norm.weight": Buffer("F32", (20,), all_of_it[580:].copy().view(np.uint8)),
    }


def write_chain(folder: Path, last: int, *, about: About = ABOUT, keep: int | None = None) -> Path:
    """A chain of the versions 0 to `last`."""
    writer = ChainWriter(folder, about, keep=keep)
    writer.begin(0, weights(0))
    for version in range(1, last + 1):
        writer.append(version, weights(version))
    writer.close()
    return folder


def equal(first: Buffers, second: Buffers) -> bool:
    return first.keys() == second.keys() and all(
        first[name].kind == second[name].kind and np.array_equal(first[name].data, second[name].data) for name in first
    )
