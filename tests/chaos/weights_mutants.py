"""Bugs to seed in the lease protocol, mistakes that somebody could make. Readers under fire must notice each."""

from __future__ import annotations

from typing import Any

from async_grpo_ipc.attachment import Attachment, Lease
from async_grpo_ipc.control import Control, SlotState
from async_grpo_ipc.exporter import WeightExporter
from async_grpo_ipc.locks import FIRST_SLOT_BYTE, LockFile
from async_grpo_ipc.remote import RemoteWeights


def written_without_the_lock() -> None:
    def claim(self: Any) -> int | None:
        slots = range(len(self._in_slots))
        return next((slot for slot in slots if slot != self._current), None)

    WeightExporter._claim_slot = claim  # type: ignore[method-assign]


def ready_before_the_copy() -> None:
    def copy(self: Any, slot: int) -> None:
        self._mark(slot, SlotState.READY, self.version + 1 if self.version is not None else 1)
        self._release_slot(slot)
        real(self, slot)

    real = WeightExporter._copy
    WeightExporter._copy = copy  # type: ignore[method-assign]


def read_without_a_lease() -> None:
    def try_lock(self: Any, byte: int, *, shared: bool = False) -> bool:
        return (shared and byte >= FIRST_SLOT_BYTE) or real(self, byte, shared=shared)

    real = LockFile.try_lock
    LockFile.try_lock = try_lock  # type: ignore[method-assign]


def aliased_weights_not_held() -> None:
    def move(self: Any, lease: Lease, models: Any) -> int:
        version = real(self, lease, models)
        self.release()
        return version

    real = RemoteWeights._move_to
    RemoteWeights._move_to = move  # type: ignore[method-assign]
    RemoteWeights.intact = lambda self: True  # type: ignore[method-assign]


def dead_exporters_believed() -> None:
    """Seen on a GPU only: there the memory goes with its exporter."""
    Attachment.readable = lambda self: True  # type: ignore[method-assign]


def exporters_believed_alive() -> None:
    """Likewise."""
    Control.owner_alive = lambda self: True  # type: ignore[method-assign]
    import async_grpo_ipc.attachment as attachment

    attachment.is_exiting = lambda pid: False


ANYWHERE = (written_without_the_lock, ready_before_the_copy, read_without_a_lease, aliased_weights_not_held)
MUTANTS = {mutant.__name__: mutant for mutant in (*ANYWHERE, dead_exporters_believed, exporters_believed_alive)}
GPU_ONLY = {"dead_exporters_believed", "exporters_believed_alive"}
