"""What `inspect` and `check` say."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from async_grpo_ipc.attachment import Attachment
from async_grpo_ipc.control import Control
from async_grpo_ipc.errors import ExporterDiedError
from async_grpo_ipc.handle_file import Handle, handle_path, read_handle
from async_grpo_ipc.header import SlotState
from async_grpo_ipc.layout import Layout

CHUNK_BYTES = 256 << 20  # at most this much is copied in one go to measure bandwidth


def inspect(path: Path | None, *, tensors: bool = False) -> str:
    """What the handle file says and, where its exporter lives, what the slots hold and who reads them."""
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
    where = handle_path(path)
    started = time.perf_counter()
    attachment = Attachment(where, None if device is None else torch.device(device))
    lines = [f"attached to {where} in {(time.perf_counter() - started) * 1e3:.1f} ms, the canary is whole"]
    try:
        alive = attachment.exporter_alive()
        lines.append("the exporter lives" if alive else "the exporter is dead: nothing newer will come from it")
        lease = attachment.try_lease() if attachment.readable() else None
        if lease is None:
            lines.append(f"no version can be read now: {attachment.describe_slots()}")
            return "\n".join(lines), False
        lines.append(f"version {lease.version} in slot {lease.slot}")
        lines.append(_bandwidth(attachment, attachment.memory.blocks[1 + lease.slot]))
        lines.append(_ways_to_read(attachment))
        lease.release()
        return "\n".join(lines), alive
    finally:
        attachment.close()


def _describe_layout(title: str, layout: Layout) -> list[str]:
    lines = [f"{title}: {len(layout.tensors)} tensors, {_size(layout.payload_bytes)}"]
    for bucket in layout.buckets:
        count = sum(spec.dtype == bucket.dtype for spec in layout.tensors)
        lines.append(f"  {str(bucket.dtype).removeprefix('torch.')}: {count} tensors, {_size(bucket.nbytes)}")
    return lines


def _describe_slots(handle: Handle, where: Path) -> list[str]:
    try:
        control = Control.attach(
            handle.pid, handle.control_fd, handle.control_inode, handle.generation, handle.slots, str(where)
        )
    except ExporterDiedError as error:
        return [str(error)]
    lines = ["exporter: alive" if control.owner_alive() else "exporter: dead"]
    newest = control.header.newest()
    for record in control.header.records():
        version = f" version {record.version}, {_ago(record.marked_ns / 1e9)}" if record.version >= 0 else ""
        mark = " (newest)" if newest is not None and record.slot == newest.slot else ""
        holders = control.slot_holders(record.slot)
        held = f", held by {', '.join(map(_process, holders))}" if holders else ""
        lines.append(f"slot {record.slot}: {record.state.name}{version}{mark}{held}")
    if any(record.state is SlotState.CORRUPT for record in control.header.records()):
        lines.append(
            "A CORRUPT record failed its checksum: its writer was killed just then, or the memory was damaged."
        )
    control.close()
    return lines


def _describe_tensors(handle: Handle) -> Iterator[str]:
    for spec in (*handle.static.tensors, *handle.slot.tensors):
        dtype = str(spec.dtype).removeprefix("torch.")
        yield f"{spec.offset:>14}  {dtype:<10} {list(spec.shape)!s:<20} {spec.name}"


def _bandwidth(attachment: Attachment, block: Tensor) -> str:
    """The median of five copies of (the first 256 MB of) a slot, the first of them not counted."""
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


def _ways_to_read(attachment: Attachment) -> str:
    device = attachment.memory.alias_device
    return f"a model on {device} can alias it, others pull" if device is not None else "every model has to pull it"


def _on(handle: Handle) -> str:
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
