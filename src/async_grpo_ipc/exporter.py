"""The side that publishes: `WeightExporter`."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor, nn

from async_grpo_ipc import memory
from async_grpo_ipc.control import MAX_SLOTS, Control, SlotState, new_generation
from async_grpo_ipc.copies import CopyPlan, allow_merging_over_padding
from async_grpo_ipc.handle import (
    VersionFile,
    WeightsHandle,
    boot_id,
    handle_path,
    pid_namespace,
    version_path,
    write_handle,
)
from async_grpo_ipc.layout import plan_layout, views
from async_grpo_ipc.locks import FIRST_SLOT_BYTE, OwnerLock
from async_grpo_ipc.model import model_tensors
from async_grpo_ipc.sources import Blueprint, Sources

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0
READERS_END_S = 3.0  # that readers get to finish with memory that is lost with this process
READERS_POLL_S = 0.01


class WeightExporter:
    """Publishes versions of a set of tensors in memory that other processes map.

    Use `from_model` or `from_tensors`. Nothing can be read until the first `publish`. It is a context
    manager, and belongs to the process and the thread that made it.
    """

    def __init__(
        self,
        sources: Sources,
        path: str | Path | None,
        slots: int,
        way: memory.Way = "auto",
        *,
        share_frozen: bool = False,
    ) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise ValueError(
                f"slots must be between 1 and {MAX_SLOTS}, got {slots}: 2 lets readers and the writer overlap."
            )
        self.path = handle_path(path)
        self.generation = new_generation()
        self.version: int | None = None
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._warned_at = -math.inf
        self._current: int | None = None
        self._sources = sources
        self._owner = OwnerLock(self.path)
        self._version_file = VersionFile(version_path(self.path), self.generation)
        try:
            self._static = plan_layout(sources.static, dtype=sources.dtype, start=memory.CANARY_BYTES)
            self._slot = plan_layout(sources.changing, dtype=sources.dtype, start=memory.CANARY_BYTES)
            block_bytes = [self._static.nbytes] + [self._slot.nbytes] * slots
            self._memory = memory.allocate(sources.device, self.generation, block_bytes, way)
            slots = len(self._memory.blocks) - 1  # fewer where a GPU has no room for more
            self._in_slots = [-1] * slots  # version of each slot, -1 where none is whole
            self._control = Control.create(self.generation, slots)
            self._write_static()
            self._frozen_is_shared = share_frozen and self._share_frozen()
            self._plans = self._make_plans()
            write_handle(self.path, self._handle())
        except BaseException:
            self._owner.close()
            raise
        logger.info(
            "Weights at %s: %d slots of %.3f GB, %.3f GB frozen, generation %s.",
            self.path,
            slots,
            self._slot.payload_bytes / 1e9,
            self._static.payload_bytes / 1e9,
            self.generation,
        )

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        path: str | Path | None = None,
        *,
        slots: int = 2,
        dtype: torch.dtype | None = None,
        buffers: bool = False,
        frozen: Literal["static", "changing", "skip"] = "static",
        include: Callable[[str, Tensor], bool] | None = None,
        way: memory.Way = "auto",
        share_frozen: bool = False,
    ) -> Self:
        """Publish a model's parameters.

        Args:
            model: The model that is trained. It may be trained further, moved within its device, and its
                parameters re-pointed.
            path: The handle file; by default what `CUDA_IPC_HANDLE_PATH` says, or
                `worker/ps_ipc_handle.json`.
            slots: Versions that exist at a time. 2 lets one be read while the next is written; each costs the
                trainable bytes. A GPU without room for more than 2 gives as many as it can.
            dtype: Store floating-point tensors as this (an fp32 master published as bf16, say).
            buffers: Publish the model's buffers as well.
            frozen: What becomes of parameters without `requires_grad`: `"static"` copies them once, outside
                the slots; `"changing"` treats them like the others; `"skip"` leaves them to the readers.
            include: Publish only the parameters and buffers for which `include(name, tensor)` is true.
            way: Weights of a GPU lie in its memory (`"ipc"`), or in the host's, for readers on GPUs that cannot
                reach it (`"host"`). `"auto"`: in its memory where that can be shared.
            share_frozen: Let the model's own frozen parameters live in the published memory, where that is on their
                device, so that it does not exist twice. A write to them then changes what readers see, and the memory
                stays until the process ends.

        Raises:
            ExporterAliveError: Another live exporter publishes at this path.
            IPCError: `way` is `"ipc"`, and it cannot be.
            ValueError: There is nothing to publish.
        """
        entries = [
            entry
            for entry in model_tensors(model, buffers=buffers)
            if include is None or include(entry.name, entry.tensor)
        ]
        sources = Sources.of_model(model, entries, dtype=dtype, buffers=buffers, frozen=frozen)
        return cls(sources, path, slots, way, share_frozen=share_frozen)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Tensor],
        path: str | Path | None = None,
        *,
        slots: int = 2,
        dtype: torch.dtype | None = None,
        way: memory.Way = "auto",
    ) -> Self:
        """Publish named tensors. `publish` copies what they contain at that moment; the mapping itself is read once."""
        return cls(Sources.of_tensors(tensors, dtype=dtype), path, slots, way)

    @classmethod
    def from_blueprint(
        cls,
        blueprint: Blueprint,
        write: Callable[[Mapping[str, Tensor]], None],
        path: str | Path | None = None,
        *,
        device: torch.device,
        slots: int = 2,
        way: memory.Way = "auto",
    ) -> Self:
        """Publish a model that no process holds whole: one that is sharded over several.

        Args:
            blueprint: What the model had before it was sharded.
            write: Called with the tensors to fill, by name: here with those that do not train, in each `publish`
                with the others.
            path, slots, way: As for `from_model`.
            device: Where the published tensors lie.
        """
        return cls(Sources.of_blueprint(blueprint, write, device), path, slots, way)

    def publish(self, version: int) -> bool:
        """Copy the tensors into a free slot and make it the newest version.

        Returns False, and changes nothing, where every slot but the newest is being read. Never waits for a
        reader.

        Raises:
            ValueError: `version` is not greater than the last one published.
        """
        self._sources.check()
        with self.writing(version) as slot:
            if slot is not None:
                self._copy(slot)
        return slot is not None

    @contextmanager
    def writing(self, version: int) -> Iterator[int | None]:
        """Hold a free slot, to be filled through `payload`: at the end of the block it is the newest version.

        Gives None where every slot but the newest is being read. After an error, nobody can read the slot.

        Raises:
            ValueError: as `publish`.
        """
        if self.version is not None and version <= self.version:
            raise ValueError(f"version must grow: {version} after {self.version}. For a rollback make a new exporter.")
        slot = self._claim_slot()
        if slot is None:
            self._skip(version)
            yield None
            return
        try:
            self._mark(slot, SlotState.WRITING, version)
            self._in_slots[slot] = -1
            yield slot
            self._mark(slot, SlotState.READY, version)
            self._in_slots[slot] = version
        finally:
            self._release_slot(slot)
        self._current, self.version, self._skipped_in_a_row = slot, version, 0
        self._announce(version)

    def payload(self, slot: int | None = None) -> Tensor:
        """The bytes of all tensors of a slot, by default the newest version's, as `layout` places them."""
        at = self._current if slot is None else slot
        assert at is not None, "there is no version before the first"
        return self._memory.blocks[1 + at][memory.CANARY_BYTES :]

    def copied(self) -> dict[str, Tensor]:
        """Copy, into new memory of the host, what `publish` would write into a slot now."""
        self._sources.check()
        copies = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for spec in self._slot.tensors}
        if self._sources.write is not None:
            self._sources.write(copies)
            return copies
        with torch.no_grad():
            for name, copy in copies.items():
                copy.copy_(self._sources.changing[name])
        return copies

    def close(self) -> None:
        """Withdraw the handle file. Readers that are attached keep what they have mapped; new ones fail with
        `HandleFileError`. Memory that is lost with this process (CUDA) is first withdrawn from them, which takes up to
        three seconds.
        """
        if self._owner.closed or not self._owner.is_own:
            return
        self.path.unlink(missing_ok=True)
        if not self._memory.survives_exporter:
            self._withdraw_versions()
        self._plans = []
        self._memory.close(in_use=not self._control.refuse_readers() or self._frozen_is_shared)
        self._control.close()
        self._version_file.close()
        self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The steps of publish, in order. A process killed before or after any of them leaves the older version
    # readable.

    def _claim_slot(self) -> int | None:
        """Lock a slot that is not the newest (with a single slot: that one), the oldest first, without waiting."""
        for slot in sorted(range(len(self._in_slots)), key=self._in_slots.__getitem__):
            is_newest = slot == self._current and len(self._in_slots) > 1
            if not is_newest and self._control.locks.try_lock(FIRST_SLOT_BYTE + slot):
                return slot
        return None

    def _mark(self, slot: int, state: SlotState, version: int) -> None:
        self._control.header.mark(slot, state, version)

    def _copy(self, slot: int) -> None:
        if self._sources.write is not None:
            self._sources.write(views(self._memory.blocks[1 + slot], self._slot.tensors))
            self._memory.synchronize()
            return
        if not self._plans[slot].is_fresh():
            self._plans = self._make_plans()
        with torch.no_grad():
            self._plans[slot].run()
        self._memory.synchronize()

    def _release_slot(self, slot: int) -> None:
        self._control.locks.unlock(FIRST_SLOT_BYTE + slot)

    def _announce(self, version: int) -> None:
        self._version_file.show(version)

    def _withdraw_versions(self) -> None:
        """Give no more leases, and wait a while for those that are held."""
        held = set(range(len(self._in_slots)))
        for slot in held:
            self._mark(slot, SlotState.EMPTY, -1)
        deadline = time.monotonic() + READERS_END_S
        while held := {s for s in held if not self._control.locks.try_lock(FIRST_SLOT_BYTE + s)}:
            if time.monotonic() >= deadline:
                logger.warning(
                    "The weights' memory is given up while it is read, by %s: what they "
                    "read from now on is not to be believed, and they can tell.",
                    self._readers(held),
                )
                return
            time.sleep(READERS_POLL_S)

    def _skip(self, version: int) -> None:
        self.skipped += 1
        self._skipped_in_a_row += 1
        if time.monotonic() - self._warned_at >= WARN_EVERY_S:
            self._warned_at = time.monotonic()
            logger.warning(
                "Version %d was not published (%d in a row, %d in all): every slot but the newest is read, by %s. "
                "Readers stay on version %s. If this continues, look at those processes or use more slots.",
                version,
                self._skipped_in_a_row,
                self.skipped,
                self._readers(range(self._control.header.slots)),
                self.version,
            )

    def _readers(self, slots: Iterable[int]) -> str:
        pids = sorted({pid for slot in slots for pid in self._control.slot_holders(slot)})
        return f"pids {pids}" if pids else "processes that are not visible here"

    def _make_plans(self) -> list[CopyPlan]:
        if self._sources.write is not None:
            return []
        sources = [self._sources.changing[spec.name] for spec in self._slot.tensors]
        blocks = self._memory.blocks[1:]
        for block in blocks:
            allow_merging_over_padding(block)
        specs = self._slot.tensors
        return [CopyPlan(list(views(block, specs).values()), sources, movable=sources) for block in blocks]

    def _write_static(self) -> None:
        destinations = views(self._memory.blocks[0], self._static.tensors)
        if self._sources.write is not None:
            if destinations:
                self._sources.write(destinations)
        else:
            with torch.no_grad():
                for name, destination in destinations.items():
                    destination.copy_(self._sources.static[name])
        self._memory.synchronize()

    def _share_frozen(self) -> bool:
        """Point the model's frozen parameters at their published copies. Returns whether any is there now."""
        published = views(self._memory.blocks[0], self._static.tensors)
        same = [
            (entry, published[entry.name])
            for entry in self._sources.frozen
            if (entry.tensor.device, entry.tensor.dtype) == (published[entry.name].device, published[entry.name].dtype)
        ]
        for entry, copy in same:
            entry.point_to(copy)
        if same:
            torch.cuda.empty_cache()  # what they had, where it was a GPU's
        return bool(same)

    def _handle(self) -> WeightsHandle:
        return WeightsHandle(
            generation=self.generation,
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            boot_id=boot_id(),
            created=time.time(),
            slots=self._control.header.slots,
            control_fd=self._control.fd,
            control_inode=self._control.inode,
            memory=self._memory.describe(),
            static=self._static,
            slot=self._slot,
            tied=self._sources.tied,
            complete=self._sources.complete,
            buffers=self._sources.buffers,
        )
