"""Gives the chain's writer the versions that a parameter server publishes, from two threads of its own.

The trainer's thread only takes a lease on the slot that it has just published, which waits for nothing. One thread
copies the slot and ends the lease, another encodes and writes. At most two versions wait between them: if encoding is
slower than training, a version is left out, and the next delta spans it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from loguru import logger

from async_grpo.deltas.chain import MODEL, About
from async_grpo.deltas.checkpoint import keep_surroundings, names_in_adapter
from async_grpo.deltas.writer import ChainWriter, Written
from async_grpo.errors import AsyncGRPOError, DeltaChainError, DiskFullError, WaitTimeoutError
from async_grpo.formatting import counted, size
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.telemetry.waiting import wait_until
from async_grpo_ipc.attachment import Attachment, Lease
from async_grpo_ipc.delta import Buffer
from async_grpo_ipc.delta.buffers import digest_of
from async_grpo_ipc.delta.tensors import copied, require_known
from async_grpo_ipc.errors import DeltaError, IPCError

if TYPE_CHECKING:
    from trl import GRPOTrainer

MAX_WAITING = 2
SAY_EVERY_S = 60.0
ENDING_S = 600.0  # for the versions that still wait when training has ended
NICENESS = 10  # encoding takes the processor that training leaves


def recorder_of(trainer: GRPOTrainer, run: RunDir, state: RunState, settings: TrainingSettings) -> Recorder | None:
    """What the settings ask for, None where they ask for nothing. `run.json` says where the chain is."""
    if not settings.delta_every:
        return None
    folder = Path(settings.delta_dir or state.delta_dir or f"checkpoints/deltas_{state.run_id}").absolute()
    run.update_state(of=state.run_id, delta_dir=str(folder))
    return Recorder(trainer, run.weights_handle, folder, state.run_id, settings)


@dataclass(slots=True)
class Tally:
    """What was written so far."""

    versions: int = 0
    nbytes: int = 0
    spanning: int = 0  # deltas over more versions than asked for
    changed: int = 0
    size: int = 0
    last: int | None = None

    def add(self, written: Written, *, late: bool) -> None:
        self.versions += 1
        self.nbytes += written.nbytes
        self.spanning += late
        self.last = written.version
        if not written.is_snapshot:
            self.changed += written.changed
            self.size += written.size

    def __str__(self) -> str:
        same = f", {1 - self.changed / self.size:.2%} of the elements unchanged" if self.size else ""
        late = f", {self.spanning} of them over several versions" if self.spanning else ""
        return f"{counted(self.versions, 'version')}{late} in {size(self.nbytes)}{same}"


class Recorder:
    """Records in `folder` what is published at `handle`. All its methods belong to the trainer's thread."""

    def __init__(
        self, trainer: GRPOTrainer, handle: Path, folder: Path, run_id: str, settings: TrainingSettings
    ) -> None:
        self.tally = Tally()
        self._trainer, self._handle = trainer, handle
        self._folder, self._run_id, self._settings = folder, run_id, settings
        self._attachment: Attachment | None = None
        self._writer: ChainWriter | None = None
        self._static: dict[str, Buffer] = {}  # what does not train, copied once
        self._leases: SimpleQueue[Lease | None] = SimpleQueue()
        self._copies: SimpleQueue[tuple[int, dict[str, Buffer]] | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._waiting = 0
        self._last: int | None = None  # version that was published last
        self._taken: int | None = None  # version that was leased last
        self._said_at = -SAY_EVERY_S
        self._failed = False

    def published(self, version: int) -> None:
        """Record `version`, which is the newest now, if it is due and there is room among those that wait.

        Raises:
            DeltaChainError: with the first version: there can be no chain in the folder.
        """
        self._last = version
        if self._attachment is None:
            self._begin()
        elif version // self._settings.delta_every == (self._taken or 0) // self._settings.delta_every:
            return
        self._take()

    def close(self) -> None:
        """Write the newest version too, and wait until all is on the disk."""
        if self._attachment is None:
            return
        with suppress(WaitTimeoutError):
            if self._taken != self._last and not self._failed:
                wait_until(self._has_room, what="room for the last delta", timeout_s=ENDING_S)
                self._take()
            self._leases.put(None)
            wait_until(self._has_ended, what="the last delta to be written", timeout_s=ENDING_S)
        if self._has_ended():
            self._attachment.close()
            if self._writer is not None:
                self._writer.close()
        else:  # they still read the slot and write to the chain, so both stay theirs until the process ends
            logger.warning(
                "deltas: version {} may be missing in {}: it was not written within {:.0f} s after training",
                self._last,
                self._folder,
                ENDING_S,
            )
        logger.info("deltas: {} in {}", self.tally, self._folder)

    def _begin(self) -> None:
        self._attachment = Attachment(self._handle)
        lease = self._lease()
        if lease is None:
            raise DeltaChainError(f"The first version at {self._handle} cannot be read, so no chain can begin.")
        try:
            self._writer = self._open(lease)
        finally:
            self._release(lease)
        for name, work in (("delta-copies", self._copy_all), ("delta-writer", self._write_politely)):
            self._threads.append(threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True))
            self._threads[-1].start()

    def _open(self, lease: Lease) -> ChainWriter:
        model, settings = self._trainer.model, self._settings
        is_adapter = hasattr(model, "peft_config")
        tensors, static = lease.attachment.tensors(lease.slot), lease.attachment.handle.static.tensors
        try:
            require_known(tensors.items())
        except DeltaError as error:
            raise DeltaChainError(f"{error} Leave --delta-every out.") from error
        frozen = sorted(spec.name for spec in static)
        about = About(
            chain=uuid4().hex,
            run_id=self._run_id,
            kind="adapter" if is_adapter else "model",
            frozen=digest_of(copied((name, tensors[name]) for name in frozen)) if is_adapter else None,
            names=names_in_adapter(model) if is_adapter else {},
        )
        writer = ChainWriter(self._folder, about, full_every=settings.full_every, keep=settings.delta_keep)
        try:
            keep_surroundings(model, self._trainer.processing_class, self._folder / MODEL)
        except BaseException:
            writer.close()
            raise
        if not is_adapter:
            self._static = dict(copied((name, tensors[name]) for name in frozen))
        return writer

    def _take(self) -> None:
        if self._failed or not self._has_room():
            return
        lease = self._lease()
        if lease is not None:
            self._taken = lease.version
            with self._mutex:
                self._waiting += 1
            self._leases.put(lease)
            if self._failed:  # since the look above: nobody takes it
                self._release_waiting()

    def _has_room(self) -> bool | None:
        return self._waiting < MAX_WAITING or self._failed or None

    def _has_ended(self) -> bool | None:
        return not any(thread.is_alive() for thread in self._threads) or None

    def _lease(self) -> Lease | None:
        assert self._attachment is not None
        with self._mutex:
            return self._attachment.try_lease()

    def _release(self, lease: Lease) -> None:
        with self._mutex:
            lease.attachment.end_lease(lease)

    # The two threads.

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (AsyncGRPOError, IPCError, OSError, MemoryError) as error:
            logger.error("no more deltas are written, and training continues: {}", error)
        finally:
            self._failed = True  # also where it has ended: nothing more is taken
            self._copies.put(None)

    def _copy_all(self) -> None:
        try:
            while (lease := self._leases.get()) is not None:
                try:
                    buffers = self._copy_of(lease)
                finally:
                    self._release(lease)
                self._copies.put((lease.version, buffers))
        finally:
            self._failed = True  # before the queue is emptied: no lease comes after it
            self._release_waiting()

    def _release_waiting(self) -> None:
        """A lease that nobody copies would keep its slot from the trainer for the rest of the run."""
        with suppress(Empty):
            while True:
                lease = self._leases.get_nowait()
                if lease is not None:
                    self._release(lease)

    def _copy_of(self, lease: Lease) -> dict[str, Buffer]:
        tensors = lease.attachment.tensors(lease.slot)
        names = [spec.name for spec in lease.attachment.handle.slot.tensors]
        with _own_stream(tensors[names[0]].device):
            found = dict(copied((name, tensors[name]) for name in names))
        lease.attachment.require_readable()
        return {**self._static, **found}

    def _write_politely(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._write_all()

    def _write_all(self) -> None:
        while (copy := self._copies.get()) is not None:
            version, buffers = copy
            with self._mutex:
                self._waiting -= 1
            try:
                self._write(version, buffers)
            except DiskFullError as error:
                self._say(f"version {version} is not kept, and the next one becomes a snapshot: {error}")

    def _write(self, version: int, buffers: dict[str, Buffer]) -> None:
        assert self._writer is not None
        is_first = self.tally.last is None
        written = self._writer.begin(version, buffers) if is_first else self._writer.append(version, buffers)
        if written is None:
            self.tally.last = version
            logger.info("deltas continue after version {} in {}", version, self._folder)
            return
        late = not is_first and written.span > self._settings.delta_every
        self.tally.add(written, late=late)
        if late:
            self._say(
                f"the delta of version {version} spans {written.span} versions: encoding is slower than training, or "
                "workers read every slot that those between could be published in. A larger --delta-every asks for "
                "fewer"
            )

    def _say(self, sentence: str) -> None:
        if time.monotonic() >= self._said_at + SAY_EVERY_S:
            self._said_at = time.monotonic()
            logger.warning("deltas: {}", sentence)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Copy beside what the trainer computes on the device, not after it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
