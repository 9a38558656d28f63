"""Keeps a worker's engine at the newest policy version: the seam `Policy`, and the one of a model in this process."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from async_grpo.errors import PeerDiedError, UnsupportedError
from async_grpo.setup.worker_build import stays_as_loaded
from async_grpo.telemetry.activity import ADOPTING, activity
from async_grpo_ipc import ExporterDiedError
from async_grpo_ipc.model import model_tensors, replace_memory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from async_grpo_ipc import RemoteWeights

WEIGHTS_WAIT_S = 600.0  # for a version that the trainer has announced


class Policy(ABC):
    """How an engine gets the newest policy version."""

    @abstractmethod
    def adopt(self, in_use: Collection[int] = ()) -> int | None:
        """Take on the newest version and return it: it samples the groups that start now.

        Args:
            in_use: versions of the groups that are being sampled.

        Returns:
            None where the newest version has to wait until those groups have ended. New groups wait as well.

        Raises:
            PeerDiedError: nothing is published, and the exporter has died; the groups in use go on.
            WeightsLostError: it died in the middle, and they do not.
        """


class PolicyWeights(Policy):
    """The published weights, adopted by one model: as views where they lie on its device, else as a copy.

    Args:
        device: where a model belongs that was loaded `without_weights`.

    Raises:
        UnsupportedError: from `adopt`: the model is quantised, and differently from the trainer's.
    """

    def __init__(self, remote: RemoteWeights, model: nn.Module, device: torch.device | None = None) -> None:
        self._weights = remote
        self._device = (
            device if device is None else torch.empty(0, dtype=torch.uint8, device=device).device
        )  # "cuda" has a number then
        self._model = model
        keep_layout(model)
        self._aliased = False
        self._checked = False
        self._pulled: tuple[str, int] | None = None  # generation and version of the copy

    def adopt(self, in_use: Collection[int] = ()) -> int | None:
        if in_use:
            return None
        activity.doing(ADOPTING)
        try:
            if not self._checked:
                check_same_base(self._model, self._weights, WEIGHTS_WAIT_S)
                self._checked = True
            if self._aliased:
                return self._weights.refresh(WEIGHTS_WAIT_S)
            if not self._weights.can_alias(self._model, self._device):
                return self._pull()
            version = self._weights.alias(self._model, WEIGHTS_WAIT_S)
            self._aliased = True
            torch.cuda.empty_cache()  # the model's own weights, which nothing refers to any more
            return version
        except ExporterDiedError as error:
            raise PeerDiedError(str(error)) from error

    def _pull(self) -> int:
        if self._pulled is None or self._pulled != self._weights.newest:
            if self._device is not None and any(parameter.is_meta for parameter in self._model.parameters()):
                replace_memory(self._model, self._device)
            version = self._weights.pull(self._model, WEIGHTS_WAIT_S)
            self._pulled = (self._weights.generation, version)
        return self._pulled[1]


_REPACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' Linear4bit


def keep_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking weights for this CPU at their first use: the published ones are not repacked."""
    for module in model.modules():
        if hasattr(module, _REPACKS):
            setattr(module, _REPACKS, False)


def without_weights(model: nn.Module, device: torch.device) -> None:
    """Free a model's parameters, and let its buffers be on the device where it will read the published weights."""
    if stays_as_loaded(model):
        if any(parameter.device.type == "cpu" for parameter in model.parameters()):
            model.to(device)  # that it is quantised was found while it was loaded
        return
    for entry in model_tensors(model, buffers=True):
        if not entry.is_parameter:
            entry.point_to(entry.tensor.to(device))
    replace_memory(model, "meta")
    free_memory()


def free_memory() -> None:
    """Give the GPU back what nothing refers to any more: torch keeps it, and other processes count it as taken."""
    gc.collect()
    torch.cuda.empty_cache()


def cast_parameters(model: nn.Module) -> None:
    """Give the parameters the dtype of `--publish-dtype bf16`. Buffers, such as rotary tables, keep theirs."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


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
    """The parameters that are packed bits, which need the scales that are stored with them."""
    return {name: p.data for name, p in model.named_parameters() if getattr(p, "quant_state", None) is not None}
