"""Keeps a worker's model at the newest policy version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from async_grpo.errors import PeerDiedError, UnsupportedError
from async_grpo_ipc import ExporterDiedError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from async_grpo_ipc import RemoteWeights


class PolicyWeights:
    """The published weights, adopted by one model: as views where they lie on its device, else as a copy."""

    def __init__(self, remote: RemoteWeights, model: nn.Module) -> None:
        self._remote = remote
        self._model = model
        keep_layout(model)
        self._aliased = False
        self._checked = False
        self._pulled: tuple[str, int] | None = None  # generation and version of the copy

    def adopt(self, timeout_s: float) -> int:
        """Move the model to the newest version, which stays readable until `release()`; returns the version.

        Raises:
            PeerDiedError: nothing is published, and nobody will.
            UnsupportedError: the model is quantised, and differently from the trainer's.
        """
        try:
            if not self._checked:
                check_same_base(self._model, self._remote, timeout_s)
                self._checked = True
            if self._aliased:
                return self._remote.refresh(timeout_s)
            if self._remote.can_alias(self._model):
                version = self._remote.alias(self._model, timeout_s)
                self._aliased = True
                return version
            return self._pull(timeout_s)
        except ExporterDiedError as error:
            raise PeerDiedError(str(error)) from error

    def release(self) -> None:
        """Let the trainer write over the version: the model is not read until the next `adopt()`."""
        self._remote.release()

    def _pull(self, timeout_s: float) -> int:
        if self._pulled is None or self._pulled != (self._remote.generation, self._remote.version):
            version = self._remote.pull(self._model, timeout_s)
            self._pulled = (self._remote.generation, version)
        return self._pulled[1]


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
