"""The weights of a model that FSDP2 has sharded over the ranks, gathered one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing and torch.compile rename


def gather(
    model: nn.Module, names: Collection[str], device: torch.device, into: Mapping[str, Tensor] | None = None
) -> None:
    """Gather the named parameters; every rank calls it with the same names.

    No rank ever holds more than one whole parameter beside its shards.

    Args:
        names: as before the model was sharded.
        device: where the ranks communicate; shards that are kept on the CPU go there for it.
        into: where rank 0 copies each whole parameter to; None on the other ranks.
    """
    _reshard(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            original = _original_name(name)
            if original in names:
                whole = _whole(parameter, device)
                if into is not None:
                    into[original].copy_(whole)


def _whole(parameter: Tensor, device: torch.device) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    shards: DTensor = parameter.to(device)  # type: ignore[assignment]  # which torch types as a plain tensor
    return shards.full_tensor()


def is_sharded(trainer: Any) -> bool:
    """Whether training will shard this trainer's model over the ranks."""
    return bool(trainer.is_fsdp_enabled)


def _reshard(model: nn.Module) -> None:
    """A forward pass without a backward pass leaves some modules whole, in the precision of the computation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _original_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
