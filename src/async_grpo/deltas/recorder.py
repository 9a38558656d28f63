"""Keeps the versions of a parameter server's weights.

The trainer's thread only takes a lease on the slot that it has just published, which waits for nothing; the encoder's
thread copies the slot and ends the lease. Where a lease waits already or the version is not published (an evaluation
holds an older one still, or workers read every slot), it is copied from the trainer, before its next step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from async_grpo.deltas.delta import Weights
from async_grpo.deltas.encoder import Encoder, Keeping
from async_grpo.deltas.tensors import as_words, copied
from async_grpo.errors import DeltaChainError
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo_ipc.attachment import Attachment, Lease

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo_ipc import WeightExporter


def recorder_of(trainer: GRPOTrainer, run: RunDir, state: RunState, settings: TrainingSettings) -> DeltaRecorder | None:
    """Build what the settings ask for, None where they ask for nothing. `run.json` says where the chain is."""
    if not settings.delta_every:
        return None
    folder = Path(settings.delta_dir or state.delta_dir or f"checkpoints/deltas_{state.run_id}").absolute()
    run.update_state(of=state.run_id, delta_dir=str(folder))
    return DeltaRecorder(trainer, run.weights_handle, folder, state.run_id, settings)


class DeltaRecorder:
    """Records in `folder` the versions of what is published at `handle`. Its methods belong to the trainer's thread."""

    def __init__(
        self, trainer: GRPOTrainer, handle: Path, folder: Path, run_id: str, settings: TrainingSettings
    ) -> None:
        self._trainer, self._handle = trainer, handle
        self._keeping = Keeping(folder=folder, run_id=run_id, every=settings.delta_every, keep=settings.delta_keep)
        self._attachment: Attachment | None = None
        self.encoder: Encoder | None = None
        self._mutex = threading.Lock()  # of the leases, which the encoder's thread ends
        self._has_lease = False  # that it will end: more would keep slots from the trainer
        self._last: int | None = None  # version that was reached last

    def reached(self, version: int, exporter: WeightExporter) -> None:
        """Record `version`, the trainer's weights as they are now, if it is due and the encoder has capacity.

        Raises:
            DeltaChainError: with the first version: there can be no chain in the folder.
        """
        self._last = version
        encoder = self.encoder = self.encoder or self._begin()
        if not encoder.wants(version):
            return
        if exporter.version == version and not self._has_lease:
            self._put_newest(encoder)
        else:
            copies = {name: as_words(copy) for name, copy in exporter.copied().items()}
            encoder.put(version, lambda: copies)

    def close(self) -> None:
        """Write the newest version too, and wait until all is on the disk."""
        encoder = self.encoder
        if encoder is not None:
            if encoder.taken != self._last and encoder.awaits_capacity():
                self._put_newest(encoder)
            encoder.close(self._last)
        if self._attachment is not None and (encoder is None or not encoder.thread.is_alive()):  # else it reads a slot
            self._attachment.close()

    def _begin(self) -> Encoder:
        self._attachment = Attachment(self._handle)
        lease = self._lease()
        if lease is None:
            raise DeltaChainError(f"The first version at {self._handle} cannot be read, so no chain can begin.")
        try:
            tensors, handle = lease.attachment.tensors(lease.slot), lease.attachment.handle
            changing, frozen = (
                {s.name: tensors[s.name] for s in part.tensors} for part in (handle.slot, handle.static)
            )
            return Encoder(self._keeping, self._trainer.model, self._trainer.processing_class, changing, frozen)
        finally:
            self._release(lease)

    def _put_newest(self, encoder: Encoder) -> None:
        """Lease the newest version, unless it was taken already."""
        lease = self._lease()
        if lease is None:
            return
        if encoder.taken is not None and lease.version <= encoder.taken:
            self._release(lease)
            return
        self._has_lease = True
        encoder.put(lease.version, lambda: self._copy_of(lease))

    def _lease(self) -> Lease | None:
        assert self._attachment is not None
        with self._mutex:
            return self._attachment.try_lease()

    def _release(self, lease: Lease) -> None:
        with self._mutex:
            lease.attachment.end_lease(lease)

    # The encoder's thread.

    def _copy_of(self, lease: Lease) -> Weights:
        try:
            tensors = lease.attachment.tensors(lease.slot)
            names = [spec.name for spec in lease.attachment.handle.slot.tensors]
            with _own_stream(tensors[names[0]].device):
                found = dict(copied((name, tensors[name]) for name in names))
            lease.attachment.require_readable()
            return found
        finally:
            self._release(lease)
            self._has_lease = False


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Copy beside what the trainer computes on the device, not after it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
