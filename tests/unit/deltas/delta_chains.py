"""Chains of small versions for the tests: a random walk of a few tensors."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_grpo.deltas.chain import About, TensorKind
from async_grpo.deltas.delta import Weights
from async_grpo.deltas.writer import ChainWriter

SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": [20, 20],
    "model.layers.1.mlp.up_proj.weight": [180],
    "model.norm.weight": [20],
}
KINDS = {name: TensorKind("float32", 4, shape) for name, shape in SHAPES.items()}
ABOUT = About(chain="c" * 32, run_id="run-1", tensors=KINDS)


@lru_cache(maxsize=200)
def values(version: int, seed: int) -> NDArray[np.float32]:
    if version == 0:
        return np.random.default_rng(seed).normal(0, 0.02, 600).astype(np.float32)
    rng = np.random.default_rng([seed, version])
    found = values(version - 1, seed).copy()
    found[rng.integers(0, 600, 40)] += rng.normal(0, 1e-3, 40).astype(np.float32)
    return found


def weights(version: int, *, seed: int = 0) -> Weights:
    """The weights of `version`: some elements differ from those of the version before."""
    parts = np.split(values(version, seed).view("<u4"), [400, 580])
    return {name: part.copy().reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts)}


def write_chain(folder: Path, last: int, *, about: About = ABOUT, keep: int | None = None) -> Path:
    """A chain of the versions 0 to `last`."""
    writer = ChainWriter(folder, about, keep=keep)
    writer.begin(0, weights(0))
    for version in range(1, last + 1):
        writer.append(version, weights(version))
    writer.close()
    return folder


def equal(first: Weights, second: Weights) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)
