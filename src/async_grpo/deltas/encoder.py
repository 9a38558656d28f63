"""Appends copies of versions to a chain from a thread of its own, with the priority that training leaves.

One version waits for it, or as many as fit into `WAITING_BYTES` of the host's memory. If encoding is slower than that
for long, a version is left out, and the next delta spans it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

from torch import Tensor, nn

from async_grpo.deltas.chain import MODEL, About
from async_grpo.deltas.checkpoint import keep_surroundings, names_in_adapter
from async_grpo.deltas.delta import Weights, digest_of
from async_grpo.deltas.tensors import copied, kinds_of
from async_grpo.deltas.writer import ChainWriter
from async_grpo.errors import AsyncGRPOError, DiskFullError, WaitTimeoutError
from async_grpo.formatting import counted, size
from async_grpo.log import logger
from async_grpo.setup.trl_compat import is_adapter
from async_grpo.telemetry.waiting import wait_until
from async_grpo_ipc.errors import IPCError

WAITING_BYTES = 256 * 2**20  # that versions may take besides the first one that waits
SAY_EVERY_S = 60.0
ENDING_S = 600.0  # for the versions that still wait when training has ended
NICENESS = 10  # copying and encoding take the processor that training leaves

Take = Callable[[], Weights]
"""Gives the changing tensors of a version, as memory that nobody else writes to."""


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
