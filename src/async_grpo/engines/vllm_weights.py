"""The published weights as vLLM's model takes them: names of a checkpoint, and of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from async_grpo.errors import UnsupportedError

NO_FAST_INFERENCE = "Load the model with fast_inference=False (the setup file can read FAST_INFERENCE: set it to 0)."


def plain(name: str) -> str:
    return name.replace(".base_layer.", ".")


def names_of(model: nn.Module) -> Any:
    """What makes vLLM's names of modules from those of transformers; None where they are the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def require_same_base(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise `UnsupportedError` unless the frozen weights that model and engine share are the trainer's.

    vLLM may have more rows of an embedding than the trainer; those that both have are compared.
    """
    for name, own in model.named_parameters():
        if ".lora_" in name or name not in tensors:
            continue
        here, published = (tensor if tensor.dim() else tensor[None] for tensor in (own.data, tensors[name]))
        rows = min(len(here), len(published))
        if not torch.equal(here[:rows], published[:rows].to(here)):
            raise UnsupportedError(
                f"{name} in the vLLM that Unsloth put into the model is not the trainer's, so the adapter would not "
                f"fit. {NO_FAST_INFERENCE}"
            )
