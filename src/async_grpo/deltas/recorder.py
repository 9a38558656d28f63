"""Keeps the versions of a parameter server's weights.

The trainer's thread only takes a lease on the slot that it has just published, which waits for nothing; a thread copies
the slot and ends the lease. A version that is not published (an evaluation holds an older one still, or workers read
every slot) is copied from the trainer, before its next step. `encoder` writes the copies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch

from async_grpo.deltas.encoder import ENDING_S, MIN_WAITING, Encoder, Keeping, is_due
from async_grpo.errors import AsyncGRPOError, DeltaChainError, WaitTimeoutError
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.telemetry.waiting import wait_until
from async_grpo_ipc.attachment import Attachment, Lease
from async_grpo_ipc.delta import Buffer
from async_grpo_ipc.delta.tensors import as_buffer, copied
from async_grpo_ipc.errors import IPCError

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo_ipc import WeightExporter

Copy = tuple[int, dict[str, Buffer]]  # a version and its changing tensors


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
        self._copier = threading.Thread(target=self._guarded, name="delta-copies", daemon=True)
        self._taken_up: SimpleQueue[Lease | Copy | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._leased = 0
        self._last: int | None = None  # version that was reached last
        self._taken: int | None = None  # version that was leased or copied last
        self._has_failed = False  # nobody takes leases any more

    def reached(self, version: int, exporter: WeightExporter) -> None:
        """Record `version`, the trainer's weights as they are now, if it is due and there is room for it.

        Raises:
            DeltaChainError: with the first version: there can be no chain in the folder.
        """
        self._last = version
        if self.encoder is None:
            self._begin()
        assert self.encoder is not None
        if not is_due(version, self._taken, self._keeping.every) or self._ends() or not self.encoder.has_room():
            return
        if exporter.version == version and self._leased < MIN_WAITING:
            self._take_newest()
        else:
            self._put(version, (version, {name: as_buffer(copy) for name, copy in exporter.copied().items()}))

    def close(self) -> None:
        """Write the newest version too, and wait until all is on the disk."""
        if self.encoder is None:
            if self._attachment is not None:
                self._attachment.close()
            return
        with suppress(WaitTimeoutError):
            if self._taken != self._last and not self._ends():
                wait_until(self._has_room, what="room for the last delta", timeout_s=ENDING_S)
                self._take_newest()
        self._taken_up.put(None)
        self.encoder.close(self._last)
        if not self._copier.is_alive():  # else it still reads the slot
            assert self._attachment is not None
            self._attachment.close()

    def _begin(self) -> None:
        self._attachment = Attachment(self._handle)
        lease = self._lease()
        if lease is None:
            raise DeltaChainError(f"The first version at {self._handle} cannot be read, so no chain can begin.")
        try:
            tensors, handle = lease.attachment.tensors(lease.slot), lease.attachment.handle
            changing, frozen = (
                {s.name: tensors[s.name] for s in part.tensors} for part in (handle.slot, handle.static)
            )
            model, tokenizer = self._trainer.model, self._trainer.processing_class
            self.encoder = Encoder(self._keeping, model, tokenizer, changing, frozen)
        finally:
            self._release(lease)
        self._copier.start()

    def _take_newest(self) -> None:
        """Lease the newest version, unless it was taken already."""
        lease = self._lease()
        if lease is None:
            return
        if self._taken is not None and lease.version <= self._taken:
            self._release(lease)
            return
        with self._mutex:
            self._leased += 1
        self._put(lease.version, lease)

    def _put(self, version: int, what: Lease | Copy) -> None:
        assert self.encoder is not None
        self._taken = version
        self.encoder.reserve()
        self._taken_up.put(what)
        if self._has_failed:  # since the last look: nobody takes it
            self._release_waiting()

    def _ends(self) -> bool:
        return self._has_failed or self.encoder is None or self.encoder.has_failed

    def _has_room(self) -> bool | None:
        return self._ends() or (self.encoder is not None and self.encoder.has_room()) or None

    def _lease(self) -> Lease | None:
        assert self._attachment is not None
        with self._mutex:
            return self._attachment.try_lease()

    def _release(self, lease: Lease) -> None:
        with self._mutex:
            lease.attachment.end_lease(lease)

    # The thread that copies.

    def _guarded(self) -> None:
        assert self.encoder is not None
        try:
            self._copy_all(self.encoder)
        except (AsyncGRPOError, IPCError, OSError, MemoryError) as error:
            self.encoder.failed(error)
        finally:
            self._has_failed = True  # also where it has ended: nothing more is taken
            self._release_waiting()
            self.encoder.end()

    def _copy_all(self, encoder: Encoder) -> None:
        while (taken := self._taken_up.get()) is not None:
            encoder.put(*(self._copy_of(taken) if isinstance(taken, Lease) else taken))

    def _copy_of(self, lease: Lease) -> Copy:
        try:
            return lease.version, self._tensors_of(lease)
        finally:
            self._release(lease)
            with self._mutex:
                self._leased -= 1

    def _tensors_of(self, lease: Lease) -> dict[str, Buffer]:
        tensors = lease.attachment.tensors(lease.slot)
        names = [spec.name for spec in lease.attachment.handle.slot.tensors]
        with _own_stream(tensors[names[0]].device):
            found = dict(copied((name, tensors[name]) for name in names))
        lease.attachment.require_readable()
        return found

    def _release_waiting(self) -> None:
        """A lease that nobody copies would keep its slot from the trainer for the rest of the run."""
        with suppress(Empty):
            while True:
                taken = self._taken_up.get_nowait()
                if isinstance(taken, Lease):
                    self._release(taken)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Copy beside what the trainer computes on the device, not after it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
