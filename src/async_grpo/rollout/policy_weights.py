"""Keeps a worker's model at the newest policy version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_grpo.errors import PeerDiedError
from async_grpo.rollout.quantised_base import check_same_base, keep_layout
from async_grpo_ipc import ExporterDiedError

if TYPE_CHECKING:
    from torch import nn

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
