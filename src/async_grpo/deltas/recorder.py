"""Keeps the versions of a parameter server's weights.

The trainer's thread only takes a lease on the slot that it has just published, which waits for nothing; the encoder's
thread copies the slot and ends the lease. Where a lease waits already or the version is not published (an evaluation
holds an older one still, or workers read every slot), it is copied from the trainer, before its next step.

The `Encoder` appends the copies to a chain from a thread of its own, with the priority that training leaves. One
version waits for it, or as many as fit into `WAITING_BYTES` of the host's memory. If encoding is slower than that for
long, a version is left out, and the next delta spans it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from torch import Tensor, nn

from async_grpo.deltas.chain import MODEL, About
from async_grpo.deltas.checkpoint import keep_surroundings, names_in_adapter
from async_grpo.deltas.delta import Weights, digest_of
from async_grpo.deltas.tensors import as_words, copied, kinds_of
from async_grpo.deltas.writer import ChainWriter
from async_grpo.errors import AsyncGRPOError, DeltaChainError, DiskFullError, WaitTimeoutError
from async_grpo.formatting import counted, size
from async_grpo.log import logger
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.setup.trl_compat import is_adapter
from async_grpo.telemetry.waiting import wait_until
from async_grpo_ipc.attachment import Attachment, Lease
from async_grpo_ipc.errors import IPCError

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo_ipc import WeightExporter


WAITING_BYTES = 256 * 2**20  # that versions may take besides the first one that waits
SAY_EVERY_S = 60.0
ENDING_S = 600.0  # for the versions that still wait when training has ended
NICENESS = 10  # copying and encoding take the processor that training leaves

Take = Callable[[], Weights]
"""Gives the changing tensors of a version, as memory that nobody else writes to."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    folder: Path
    run_id: str
    every: int = 1
    keep: int | None = None


class Encoder:
    """The chain of one training, and the thread that writes it.

    Args:
        model: what the versions are of; its configuration is written into the chain's folder.
        changing: the tensors that differ from version to version, by the names in the chain.
        frozen: those that do not. Of an adapter, only their hash is kept.

    Raises:
        DeltaChainError: there can be no chain in the folder.
    """

    def __init__(
        self,
        keeping: Keeping,
        model: nn.Module,
        tokenizer: object,
        changing: dict[str, Tensor],
        frozen: dict[str, Tensor],
    ) -> None:
        self.taken: int | None = None  # version that was `put` last
        self.last: int | None = None  # version that is on the disk
        self.has_failed = False
        self._folder, self._every = keeping.folder, keeping.every
        self._capacity = max(1, WAITING_BYTES // max(1, sum(tensor.nbytes for tensor in changing.values())))
        self._written = self._nbytes = 0
        self._said_at = -SAY_EVERY_S
        self._writer, self._static = _open(keeping, model, tokenizer, changing, frozen)
        self._waiting: SimpleQueue[tuple[int, Take] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="delta-writer", daemon=True)
        self.thread.start()

    def wants(self, version: int) -> bool:
        """Whether a version is to be kept, and it can be queued."""
        is_due = self.taken is None or version // self._every != self.taken // self._every
        return is_due and self.has_capacity()

    def has_capacity(self) -> bool:
        return not self.has_failed and self._waiting.qsize() < self._capacity

    def awaits_capacity(self) -> bool:
        """Wait until one more version can be queued. False: there was none in time, or nothing is written any more."""
        with suppress(WaitTimeoutError):
            may_take: Callable[[], bool | None] = lambda: self.has_failed or self.has_capacity() or None  # noqa: E731
            wait_until(may_take, what="room for the last delta", timeout_s=ENDING_S)
        return self.has_capacity()

    def put(self, version: int, take: Take) -> None:
        """Append a version. The thread calls `take` in any case, also where it writes nothing any more."""
        self.taken = version
        self._waiting.put((version, take))

    def close(self, last: int | None) -> None:
        """Write what waits, and wait until all is on the disk."""
        self._waiting.put(None)
        with suppress(WaitTimeoutError):
            wait_until(self._has_ended, what="the last delta to be written", timeout_s=ENDING_S)
        if self._has_ended():
            self._writer.close()
        else:  # it still writes to the chain, which stays its own until the process ends
            logger.warning(
                "deltas: version {} may be missing in {}: it was not written within {:.0f} s after training",
                last,
                self._folder,
                ENDING_S,
            )
        logger.info("deltas: {} in {} in {}", counted(self._written, "version"), size(self._nbytes), self._folder)

    def _has_ended(self) -> bool | None:
        return not self.thread.is_alive() or None

    # The thread.

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (waiting := self._waiting.get()) is not None:
            version, take = waiting
            try:
                weights = take()
                if not self.has_failed:
                    self._write(version, {**self._static, **weights})
            except DiskFullError as error:
                self._say(f"version {version} is not kept, and the next one becomes a snapshot: {error}")
            except (AsyncGRPOError, IPCError, OSError, MemoryError) as error:
                self.has_failed = True
                logger.error("no more deltas are written, and training continues: {}", error)

    def _write(self, version: int, weights: Weights) -> None:
        is_first = self.last is None
        written = self._writer.begin(version, weights) if is_first else self._writer.append(version, weights)
        self.last = version
        if written is None:
            logger.info("deltas continue after version {} in {}", version, self._folder)
            return
        self._written += 1
        self._nbytes += written.nbytes
        if not is_first and written.header.span > self._every:
            self._say(
                f"the delta of version {version} spans {written.header.span} versions: encoding is slower than "
                "training. A larger --delta-every asks for fewer"
            )

    def _say(self, sentence: str) -> None:
        if time.monotonic() >= self._said_at + SAY_EVERY_S:
            self._said_at = time.monotonic()
            logger.warning("deltas: {}", sentence)


def _open(
    keeping: Keeping, model: nn.Module, tokenizer: object, changing: dict[str, Tensor], frozen: dict[str, Tensor]
) -> tuple[ChainWriter, Weights]:
    """The writer, and the frozen tensors that are part of every version."""
    of_adapter = is_adapter(model)
    about = About(
        chain=uuid4().hex,
        run_id=keeping.run_id,
        kind="adapter" if of_adapter else "model",
        frozen=digest_of(copied((name, frozen[name]) for name in sorted(frozen))) if of_adapter else None,
        names=names_in_adapter(model) if of_adapter else {},
        tensors=kinds_of(changing if of_adapter else {**frozen, **changing}),
    )
    writer = ChainWriter(keeping.folder, about, keep=keeping.keep)
    try:
        keep_surroundings(model, tokenizer, keeping.folder / MODEL)
    except BaseException:
        writer.close()
        raise
    return writer, {} if of_adapter else dict(copied(frozen.items()))
