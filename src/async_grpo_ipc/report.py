"""What `inspect`, `check` and `async-grpo status` report about the weights of an exporter.

torch is imported only by `check` and where layouts are read: `look_at_slots`, for `status`, needs none.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo_ipc.control import Control, SlotState
from async_grpo_ipc.errors import ExporterDiedError
from async_grpo_ipc.handle import WeightsHandle, handle_path, read_handle, read_head

if TYPE_CHECKING:
    from torch import Tensor

    from async_grpo_ipc.attachment import Attachment
    from async_grpo_ipc.layout import Layout

CHUNK_BYTES = 256 << 20  # at most this much is copied in one go to measure bandwidth


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot at the moment of the look."""

    number: int
    state: str  # EMPTY, WRITING, READY, CORRUPT
    version: int  # -1 before the first
    marked: float  # seconds since the epoch
    newest: bool
    holders: tuple[int, ...]  # pids that read or write it


def look_at_slots(path: Path, pids: Sequence[int]) -> list[Slot]:
    """The slots that the handle file at `path` names; of the holders, those that are among `pids`.

    Raises:
        IPCError: there is nothing to look at; the message says why.
    """
    found = read_head(path)
    control = Control.attach(
        found.pid, found.control_fd, found.control_inode, found.generation, found.slots, str(path), reader=False
    )
    try:
        return _slots(control, pids)
    finally:
        control.close()


def _slots(control: Control, pids: Sequence[int] | None) -> list[Slot]:
    newest = control.header.newest()
    return [
        Slot(
            number=record.slot,
            state=record.state.name,
            version=record.version,
            marked=record.marked_ns / 1e9,
            newest=newest is not None and record.slot == newest.slot,
            holders=tuple(control.slot_holders(record.slot, pids)),
        )
        for record in control.header.records()
    ]


def inspect(path: Path | None, *, tensors: bool = False) -> str:
    """What the handle file says and, where its exporter lives, what the slots hold and which processes read them."""
    where = handle_path(path)
    handle = read_handle(where)
    lines = [f"{where}: generation {handle.generation}, written {_ago(handle.created)} by pid {handle.pid}"]
    lines += _describe_layout("frozen", handle.static)
    lines += _describe_layout(f"each of {handle.slots} slots", handle.slot)
    lines += [f"memory: {handle.memory['kind']}" + _on(handle), f"tied names: {len(handle.tied)}"]
    lines += _describe_slots(handle, where)
    if tensors:
        lines += list(_describe_tensors(handle))
    return "\n".join(lines)


def check(path: Path | None, device: str | None) -> tuple[str, bool]:
    """Attach as a reader would and try the memory. Returns the report and whether weights can be read.

    Raises:
        IPCError: It cannot be attached; the message says why, and what to do.
    """
    import torch

    from async_grpo_ipc.attachment import Attachment

    where = handle_path(path)
    started = time.perf_counter()
    attachment = Attachment(where, None if device is None else torch.device(device))
    lines = [f"attached to {where} in {(time.perf_counter() - started) * 1e3:.1f} ms, the canary is whole"]
    try:
        alive = attachment.exporter_alive()
        lines.append("the exporter lives" if alive else "the exporter is dead: nothing newer will come from it")
        lease = attachment.try_lease()
        if lease is None:
            lines.append(f"no version can be read now: {attachment.describe_slots()}")
            return "\n".join(lines), False
        lines.append(f"version {lease.version} in slot {lease.slot}")
        lines.append(_bandwidth(attachment, attachment.memory.blocks[1 + lease.slot]))
        lines.append(_ways_to_read(attachment))
        attachment.end_lease(lease)
        return "\n".join(lines), alive
    finally:
        attachment.close()


def _describe_layout(title: str, layout: "Layout") -> list[str]:
    lines = [f"{title}: {len(layout.tensors)} tensors, {_size(layout.payload_bytes)}"]
    for bucket in layout.buckets:
        count = sum(spec.dtype == bucket.dtype for spec in layout.tensors)
        lines.append(f"  {str(bucket.dtype).removeprefix('torch.')}: {count} tensors, {_size(bucket.nbytes)}")
    return lines


def _describe_slots(handle: WeightsHandle, where: Path) -> list[str]:
    fd, inode = handle.control_fd, handle.control_inode
    try:
        control = Control.attach(handle.pid, fd, inode, handle.generation, handle.slots, str(where), reader=False)
    except ExporterDiedError as error:
        return [str(error)]
    slots = _slots(control, None)
    lines = ["exporter: alive" if control.owner_alive() else "exporter: dead", *map(_describe_slot, slots)]
    control.close()
    if any(slot.state == SlotState.CORRUPT.name for slot in slots):
        lines.append(
            "A CORRUPT record failed its checksum: its writer was killed just then, or the memory was damaged."
        )
    return lines


def _describe_slot(slot: Slot) -> str:
    version = f" version {slot.version}, {_ago(slot.marked)}" if slot.version >= 0 else ""
    held = f", held by {', '.join(map(_process, slot.holders))}" if slot.holders else ""
    return f"slot {slot.number}: {slot.state}{version}{' (newest)' if slot.newest else ''}{held}"


def _describe_tensors(handle: WeightsHandle) -> Iterator[str]:
    for spec in (*handle.static.tensors, *handle.slot.tensors):
        dtype = str(spec.dtype).removeprefix("torch.")
        yield f"{spec.offset:>14}  {dtype:<10} {list(spec.shape)!s:<20} {spec.name}"


def _bandwidth(attachment: "Attachment", block: "Tensor") -> str:
    """The median of five copies of (the first 256 MB of) a slot, the first of them not counted."""
    import torch

    source = block[:CHUNK_BYTES]
    device = attachment.memory.alias_device or torch.device("cpu")
    destination = torch.empty(source.shape, dtype=source.dtype, device=device)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        destination.copy_(source)
        attachment.memory.synchronize()
        seconds.append(time.perf_counter() - started)
    rate = source.numel() / statistics.median(seconds[1:]) / 1e9
    return f"copied {_size(source.numel())} to {device} at {rate:.1f} GB/s"


def _ways_to_read(attachment: "Attachment") -> str:
    device = attachment.memory.alias_device
    return f"a model on {device} can alias it, others pull" if device is not None else "every model has to pull it"


def _on(handle: WeightsHandle) -> str:
    return (
        f" on {handle.memory['device_name']} ({handle.memory['device_uuid']})"
        if handle.memory["kind"] == "cuda"
        else ""
    )


def _process(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({command})"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3f} MB"


def _ago(timestamp: float) -> str:
    return f"{max(time.time() - timestamp, 0):.0f} s ago"
