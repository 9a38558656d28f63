"""An exporter's memory, mapped into this process, and the leases on its slots: here a reader takes a version.

`Generations.take_lease` waits for one, `Attachment.try_lease` locks its slot and reads its record again. There is one
`Attachment` a generation; `Generations` follows a path from one exporter to the next.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from async_grpo_ipc import memory
from async_grpo_ipc.control import Control, SlotRecord, SlotState
from async_grpo_ipc.errors import (
    AttachError,
    ExporterDiedError,
    HandleFileError,
    IPCError,
    NoRoomError,
    ShareTimeoutError,
    VersionGoneError,
)
from async_grpo_ipc.handle import WeightsHandle, boot_id, pid_namespace, read_handle
from async_grpo_ipc.layout import views
from async_grpo_ipc.locks import FIRST_SLOT_BYTE, is_exiting
from async_grpo_ipc.model import Binding

logger = logging.getLogger(__name__)

POLL_S = 0.001
Stamp = tuple[int, int]


class Attachment:
    """Everything that a handle file names, mapped and checked. For one thread at a time."""

    def __init__(self, path: Path, device: torch.device | None = None) -> None:
        self._path = path
        self.handle = read_handle(path)
        _require_same_machine(self.handle, path)
        handle = self.handle
        self._control = Control.attach(
            handle.pid, handle.control_fd, handle.control_inode, handle.generation, handle.slots, str(path)
        )
        try:
            self.memory = _attached(handle, path, device)
        except BaseException as error:
            lost = isinstance(error, AttachError) and (not self.exporter_alive() or is_exiting(handle.pid))
            self._control.close()
            if lost:  # it died after it was found here: that is no trouble of this process
                raise _died(path, handle.pid) from error
            raise
        self._held: Counter[int] = Counter()  # leases on each slot: they share the one lock that this opened file has
        self._retired = False
        self._static_views = views(self.memory.blocks[0], handle.static.tensors)
        self._slot_views: dict[int, dict[str, Tensor]] = {}

    def newest(self) -> SlotRecord | None:
        """What the header says is the newest whole version: a hint."""
        return self._control.header.newest()

    def exporter_alive(self) -> bool:
        return self._control.owner_alive()

    def readable(self) -> bool:
        """Whether the memory may be read at all: on CUDA only while its owner lives.

        A process that is being ended loses its GPU memory before the kernel drops its locks, so both are asked.
        """
        return self.memory.survives_exporter or (self.exporter_alive() and not is_exiting(self.handle.pid))

    def require_readable(self) -> None:
        """Raise `ExporterDiedError` where what was read just now may not be what was published."""
        if not self.readable():
            raise _died(self._path, self.handle.pid)

    def try_lease(self, version: int | None = None) -> "Lease | None":
        """A hold on the newest version, or on this one, until `end_lease`. None where it is not there, its slot is just
        written, or the memory may not be read any more.
        """
        header = self._control.header
        wanted = header.newest() if version is None else header.find(version)
        if wanted is None or not self.readable():
            return None
        if not self._control.locks.try_lock(FIRST_SLOT_BYTE + wanted.slot, shared=True):
            return None
        self._held[wanted.slot] += 1
        found = header.slot(wanted.slot)  # now that it cannot change
        lease = Lease(self, found.slot, found.version)
        as_wanted = found.version == version if version is not None else found.version >= wanted.version
        if found.state is SlotState.READY and as_wanted:
            return lease
        self.end_lease(lease)
        return None

    def end_lease(self, lease: "Lease") -> None:
        """Let the exporter write the slot, if this was the last lease on it here."""
        self._held[lease.slot] -= 1
        if not self._held[lease.slot]:
            self._control.locks.unlock(FIRST_SLOT_BYTE + lease.slot)
        if self._retired:
            self.retire()

    def retire(self) -> None:
        """Close as soon as no lease is left."""
        self._retired = True
        if not self._held.total():
            self.close()

    def tensors(self, slot: int) -> dict[str, Tensor]:
        """All published tensors of a slot by name, the frozen and the tied ones included."""
        if slot not in self._slot_views:
            stored = self._static_views | views(self.memory.blocks[1 + slot], self.handle.slot.tensors)
            self._slot_views[slot] = stored | {name: stored[primary] for name, primary in self.handle.tied.items()}
        return self._slot_views[slot]

    def bind(self, model: nn.Module) -> Binding:
        return Binding(model, self.handle, self.memory, str(self._path))

    def describe_slots(self) -> str:
        """For messages: `slot 0 READY version 7, slot 1 WRITING version 8`."""
        return ", ".join(
            f"slot {record.slot} {record.state.name}" + (f" version {record.version}" if record.version >= 0 else "")
            for record in self._control.header.records()
        )

    def close(self) -> None:
        self._static_views, self._slot_views = {}, {}
        self.memory.close()
        self._control.close()


def _attached(handle: WeightsHandle, path: Path, device: torch.device | None) -> memory.AttachedMemory:
    attached = memory.attach(handle.memory, handle.pid, device)
    try:
        _check_canaries(attached, handle, path)
    except BaseException:
        attached.close()
        raise
    return attached


@dataclass(frozen=True, slots=True)
class Lease:
    """A version whose slot the exporter cannot write until `attachment.end_lease` is called with this."""

    attachment: Attachment
    slot: int
    version: int


class Generations:
    """The attachment in use, and the next one from the moment its exporter has written a handle file.

    The next one comes into use with its first version: until then the last version of the exporter before
    stays readable.
    """

    def __init__(self, path: Path, device: torch.device | None = None) -> None:
        self.path = path
        self._device = device
        self._seen = _stamp_of(path)
        self._current = Attachment(path, device)
        self._next: Attachment | None = None
        self.read_last = self._current.handle.generation  # of the last lease

    def follow(self) -> Attachment:
        """The attachment to read now: notices a new exporter, and changes over to it once it has published."""
        stamp = _stamp_of(self.path)
        if stamp is not None and stamp != self._seen:
            self._seen = stamp
            self._attach_next()
        if self._next is not None and self._next.newest() is not None:
            old, self._current, self._next = self._current, self._next, None
            old.retire()
            logger.info(
                "Weights at %s come from a new exporter: pid %d, generation %s (before: pid %d, %s).",
                self.path,
                self._current.handle.pid,
                self._current.handle.generation,
                old.handle.pid,
                old.handle.generation,
            )
        return self._current

    def exporter_alive(self) -> bool:
        return self._current.exporter_alive() or (self._next is not None and self._next.exporter_alive())

    def take_lease(self, timeout_s: float, version: int | None = None) -> Lease:
        """A hold on the newest version, or on this one. Waits where it is not there yet, or its slot is written."""
        deadline = time.monotonic() + timeout_s
        while True:
            current = self.follow()
            lease = current.try_lease(version)
            if lease is not None:
                self.read_last = current.handle.generation
                return lease
            newest = current.newest()
            if version is not None and newest is not None and newest.version > version:
                raise VersionGoneError(
                    f"Version {version} at {self.path} is not there any more ({current.describe_slots()}). "
                    "The process that names a version must hold a lease on it until it has been read."
                )
            if not self.exporter_alive() and (not current.readable() or current.newest() is None):
                raise _died(self.path, current.handle.pid)
            if time.monotonic() >= deadline:
                wanted = "A version" if version is None else f"Version {version}"
                raise ShareTimeoutError(
                    f"{wanted} could not be read at {self.path} within {timeout_s:g} s "
                    f"({current.describe_slots()}; exporter {'alive' if self.exporter_alive() else 'gone'}). "
                    f"Wait longer, or see whether it publishes: python -m async_grpo_ipc inspect {self.path}"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        for attachment in (self._current, self._next):
            if attachment is not None:
                attachment.retire()

    def _attach_next(self) -> None:
        try:
            attachment = Attachment(self.path, self._device)
        except NoRoomError:  # the one before may be gone, and nobody would try this one again
            raise
        except IPCError as error:
            logger.warning("Stay with the weights of generation %s: %s", self._current.handle.generation, error)
            return
        if self._next is not None:
            self._next.close()
            self._next = None
        if attachment.handle.generation == self._current.handle.generation:
            attachment.close()
        else:
            self._next = attachment


def _stamp_of(path: Path) -> Stamp | None:
    """Changes whenever the file is replaced. None where there is no file."""
    try:
        found = path.lstat()
    except OSError:  # whatever it is, reading the file says so
        return None
    return found.st_ino, found.st_mtime_ns


def _require_same_machine(handle: WeightsHandle, path: Path) -> None:
    if handle.boot_id != boot_id():
        raise HandleFileError(
            f"{path} was written on another machine, or before this one was restarted. Memory is shared "
            "within one machine only: start the exporter here."
        )
    if handle.pid_namespace != pid_namespace():
        raise AttachError(
            f"The exporter of {path} runs in another container ({handle.pid_namespace}, here "
            f"{pid_namespace()}). Start the containers with one pid namespace (docker: --pid=host or "
            "--pid=container:NAME, and --ipc likewise for CUDA)."
        )


def _check_canaries(attached: memory.AttachedMemory, handle: WeightsHandle, path: Path) -> None:
    for number, block in enumerate(attached.blocks):
        expected = torch.frombuffer(bytearray(memory.canary(handle.generation, number)), dtype=torch.uint8)
        found = block[: memory.CANARY_BYTES].cpu()
        if torch.equal(found, expected):
            continue
        wrong = int((found != expected).sum())
        raise AttachError(
            f"The memory of {path} can be mapped but does not show what the exporter wrote: {wrong} of "
            f"{memory.CANARY_BYTES} canary bytes of block {number} differ. On CUDA this happens with peer access "
            "through a translating IOMMU: disable the IOMMU or use one device."
        )


def _died(path: Path, pid: int) -> ExporterDiedError:
    return ExporterDiedError(
        f"The exporter of {path} (pid {pid}) has ended and left nothing that may be read. Start it again: "
        "readers attach to the new one by themselves."
    )
