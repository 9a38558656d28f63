"""Weights of torch's tensors, and back. Readers of a chain's headers do without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from async_grpo.deltas.chain import TensorKind
from async_grpo.deltas.coding import Bytes, Words
from async_grpo.deltas.delta import Weights
from async_grpo.errors import DeltaChainError
from async_grpo_ipc.fields import CANARY_BYTES
from async_grpo_ipc.layout import Layout

KNOWN_BYTES = (1, 2, 4, 8)  # of an element


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorKind]:
    """What `chain.json` says of tensors. `DeltaChainError` where one cannot be in a chain."""
    kinds = {}
    for name, tensor in tensors.items():
        if tensor.itemsize not in KNOWN_BYTES:
            raise DeltaChainError(
                f"Tensor {name} is {tensor.dtype}, and deltas know elements of up to 8 bytes. Leave --delta-every out."
            )
        kinds[name] = TensorKind(str(tensor.dtype).removeprefix("torch."), tensor.itemsize, list(tensor.shape))
    return kinds


def copied(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Words]]:
    """Copies of tensors on any device, as words that share no memory with them."""
    for name, tensor in tensors:
        own = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        own.copy_(tensor.detach())
        yield name, as_words(own)


def as_words(tensor: Tensor) -> Words:
    """The elements of a contiguous tensor of the host as unsigned integers, which share its memory."""
    data: Words = tensor.reshape(-1).view(torch.uint8).numpy()
    return data.view(f"<u{tensor.itemsize}").reshape(tensor.shape)


def as_stored(payload: Bytes, layout: Layout) -> dict[str, Words]:
    """Words that share the memory of a block: each tensor's elements in the order in which they lie there.

    Args:
        payload: of the block, all but its canary.
    """
    found = {}
    for spec in layout.tensors:
        start = spec.offset - CANARY_BYTES
        words: Words = payload[start : start + spec.nbytes].view(f"<u{spec.dtype.itemsize}")
        found[spec.name] = words.reshape(spec.shape)
    return found


def as_tensors(weights: Weights, kinds: Mapping[str, TensorKind]) -> dict[str, Tensor]:
    """Tensors that share the memory of the words."""
    found = {}
    for name, words in weights.items():
        dtype = getattr(torch, kinds[name].dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != words.itemsize:
            raise DeltaChainError(f"Tensor {name} has the dtype {kinds[name].dtype}, which this torch does not know.")
        found[name] = torch.from_numpy(words.reshape(-1).view("u1")).view(dtype).reshape(words.shape)
    return found
