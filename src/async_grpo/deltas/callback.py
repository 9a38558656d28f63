"""Keeps the versions of any transformers trainer, as a parameter server keeps those that it publishes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from async_grpo.deltas.recorder import Encoder, Keeping
from async_grpo.deltas.tensors import copied
from async_grpo.errors import UnsupportedError
from async_grpo_ipc.model import model_tensors


class DeltaCallback(TrainerCallback):
    """Writes a chain of versions: `Trainer(..., callbacks=[DeltaCallback("checkpoints/deltas")])`.

    A version is an optimizer step; version 0 is the model before the first. The weights are copied after the step, and
    encoded in a thread of its own. Of an adapter, only the adapter is kept.

    Args:
        folder: of the chain. A training that is resumed goes on in it.
        every: keep each so many versions, the first and the last.
        keep: at least so many of the newest versions stay; None: all.
        run_id: whose chain it is; another run's is refused. Default: the folder's name.

    Raises:
        UnsupportedError: training begins with a model that is sharded over several processes.
        DeltaChainError: there can be no chain in the folder.
    """

    def __init__(
        self, folder: str | Path, *, every: int = 1, keep: int | None = None, run_id: str | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}.")
        path = Path(folder).absolute()
        self._keeping = Keeping(folder=path, run_id=run_id or path.name, every=every, keep=keep)
        self._encoder: Encoder | None = None
        self._changing: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        entries = model_tensors(model, buffers=False)
        if any(isinstance(entry.tensor, DTensor) or hasattr(entry.tensor, "ds_id") for entry in entries):
            raise UnsupportedError(
                "DeltaCallback keeps a model that each process has whole, and this one is sharded (FSDP2, ZeRO-3). "
                "`async-grpo train --delta-every` keeps the versions of such a model."
            )
        if not state.is_world_process_zero:
            return
        self._close(state.global_step)  # of a training that ended with an error
        self._changing = {entry.name: entry.tensor for entry in entries if entry.tensor.requires_grad}
        frozen = {entry.name: entry.tensor for entry in entries if not entry.tensor.requires_grad}
        self._encoder = Encoder(self._keeping, model, given.get("processing_class"), self._changing, frozen)
        self._put(self._encoder, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._encoder is not None and self._encoder.wants(state.global_step):
            self._put(self._encoder, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        encoder = self._encoder
        if encoder is not None and encoder.taken != state.global_step and encoder.awaits_capacity():
            self._put(encoder, state.global_step)
        self._close(state.global_step)

    def _put(self, encoder: Encoder, version: int) -> None:
        copies = dict(copied(self._changing.items()))
        encoder.put(version, lambda: copies)

    def _close(self, last: int) -> None:
        if self._encoder is not None:
            self._encoder.close(last)
        self._encoder = None
