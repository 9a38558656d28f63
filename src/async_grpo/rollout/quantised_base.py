"""4-bit models (QLoRA, bitsandbytes): the worker quantises the base itself, and must have got what the trainer has.

The packed weights of the base are published and mapped like any frozen parameter; their scales are no parameters, and
stay the worker's own. The two belong together only when both processes quantised the same weights in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from async_grpo.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from async_grpo_ipc import RemoteWeights

_PACKS_ANEW = "support_avx512bf16_for_cpu"  # of bitsandbytes' Linear4bit


def keep_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from packing weights anew for this CPU with the first use: the published ones are not."""
    for module in model.modules():
        if hasattr(module, _PACKS_ANEW):
            setattr(module, _PACKS_ANEW, False)


def check_same_base(model: nn.Module, remote: RemoteWeights, timeout_s: float) -> None:
    """Compare the quantised weights that this process made with the trainer's; each is read once.

    Raises:
        UnsupportedError: they differ, so the scales of the one do not fit the weights of the other.
    """
    packed = quantised(model)
    if not packed:
        return
    with remote.lease(timeout_s) as view:
        for name, own in packed.items():
            if name in view and not torch.equal(view[name].to(own.device), own):
                raise UnsupportedError(
                    f"The quantised weights of {name} are not those of the trainer. Load the same base with the same "
                    "quantization_config in every process; with different kinds of devices, use bf16 instead of 4 bits."
                )


def quantised(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are packed bits and make sense only with scales that are kept beside them."""
    return {name: p.data for name, p in model.named_parameters() if getattr(p, "quant_state", None) is not None}
