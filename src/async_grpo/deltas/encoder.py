"""Appends copies of versions to a chain from a thread of its own, with the priority that training leaves.

Versions wait for it in the host's memory: two, or as many as fit into `WAITING_BYTES`. If encoding is slower than that
for long, a version is left out, and the next delta spans it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

from torch import Tensor, nn

from async_grpo.deltas.chain import MODEL, About
from async_grpo.deltas.checkpoint import keep_surroundings, names_in_adapter
from async_grpo.deltas.writer import ChainWriter, Written
from async_grpo.errors import AsyncGRPOError, DeltaChainError, DiskFullError, WaitTimeoutError
from async_grpo.formatting import counted, size
from async_grpo.log import logger
from async_grpo.setup.trl_compat import is_adapter
from async_grpo.telemetry.waiting import wait_until
from async_grpo_ipc.delta import Buffer
from async_grpo_ipc.delta.buffers import digest_of
from async_grpo_ipc.delta.tensors import copied, require_known
from async_grpo_ipc.errors import DeltaError, IPCError

MIN_WAITING = 2
WAITING_BYTES = 256 * 2**20  # that further versions may take
SAY_EVERY_S = 60.0
ENDING_S = 600.0  # for the versions that still wait when training has ended
NICENESS = 10  # encoding takes the processor that training leaves

Buffers = dict[str, Buffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Which versions are kept, and where."""

    folder: Path
    run_id: str
    every: int = 1
    keep: int | None = None


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
        self.tally = Tally()
        self._folder, self._every = keeping.folder, keeping.every
        self._bytes = sum(tensor.nbytes for tensor in changing.values())
        self._writer, self._static = _open(keeping, model, tokenizer, changing, frozen)
        self._copies: SimpleQueue[tuple[int, Buffers] | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._waiting = 0
        self.has_failed = False
        self._said_at = -SAY_EVERY_S
        self.thread = threading.Thread(target=self._run, name="delta-writer", daemon=True)
        self.thread.start()

    def has_room(self) -> bool:
        return self._waiting < max(MIN_WAITING, WAITING_BYTES // max(1, self._bytes))

    def awaits_room(self) -> bool:
        """Wait for room for one more version. False: there was none in time, or nothing is written any more."""
        with suppress(WaitTimeoutError):
            wait_until(self._may_take, what="room for the last delta", timeout_s=ENDING_S)
        return self.thread.is_alive() and self.has_room()

    def _may_take(self) -> bool | None:
        return self.has_room() or not self.thread.is_alive() or None

    def reserve(self) -> None:
        """Count a version that will be `put` by another thread."""
        with self._mutex:
            self._waiting += 1

    def put(self, version: int, buffers: Buffers) -> None:
        """Append a version for which room is reserved: its changing tensors."""
        self._copies.put((version, {**self._static, **buffers}))

    def end(self) -> None:
        """Write what waits, and end."""
        self._copies.put(None)

    def close(self, last: int | None) -> None:
        """Wait until all is on the disk, after `end`."""
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
        logger.info("deltas: {} in {}", self.tally, self._folder)

    def failed(self, error: BaseException) -> None:
        """Write nothing more; the training continues."""
        self.has_failed = True
        logger.error("no more deltas are written, and training continues: {}", error)

    def _has_ended(self) -> bool | None:
        return not self.thread.is_alive() or None

    # The thread.

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._write_all()
        except (AsyncGRPOError, IPCError, OSError, MemoryError) as error:
            self.failed(error)

    def _write_all(self) -> None:
        while (copy := self._copies.get()) is not None:
            version, buffers = copy
            with self._mutex:
                self._waiting -= 1
            try:
                self._write(version, buffers)
            except DiskFullError as error:
                self._say(f"version {version} is not kept, and the next one becomes a snapshot: {error}")

    def _write(self, version: int, buffers: Buffers) -> None:
        is_first = self.tally.last is None
        written = self._writer.begin(version, buffers) if is_first else self._writer.append(version, buffers)
        if written is None:
            self.tally.last = version
            logger.info("deltas continue after version {} in {}", version, self._folder)
            return
        late = not is_first and written.span > self._every
        self.tally.add(written, late=late)
        if late:
            self._say(
                f"the delta of version {version} spans {written.span} versions: encoding is slower than training. A "
                "larger --delta-every asks for fewer"
            )

    def _say(self, sentence: str) -> None:
        if time.monotonic() >= self._said_at + SAY_EVERY_S:
            self._said_at = time.monotonic()
            logger.warning("deltas: {}", sentence)


def is_due(version: int, before: int | None, every: int) -> bool:
    """Whether a version is to be kept when `before` was the last one."""
    return before is None or version // every != before // every


def _open(
    keeping: Keeping, model: nn.Module, tokenizer: object, changing: dict[str, Tensor], frozen: dict[str, Tensor]
) -> tuple[ChainWriter, Buffers]:
    """The writer, and the frozen tensors that are part of every version."""
    of_adapter = is_adapter(model)
    try:
        require_known({**changing, **frozen}.items())
    except DeltaError as error:
        raise DeltaChainError(f"{error} Leave --delta-every out.") from error
    about = About(
        chain=uuid4().hex,
        run_id=keeping.run_id,
        kind="adapter" if of_adapter else "model",
        frozen=digest_of(copied((name, frozen[name]) for name in sorted(frozen))) if of_adapter else None,
        names=names_in_adapter(model) if of_adapter else {},
    )
    writer = ChainWriter(keeping.folder, about, keep=keeping.keep)
    try:
        keep_surroundings(model, tokenizer, keeping.folder / MODEL)
    except BaseException:
        writer.close()
        raise
    return writer, {} if of_adapter else dict(copied(frozen.items()))
