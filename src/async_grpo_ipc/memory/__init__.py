"""The seam between the protocol and the kind of memory: POSIX shared memory here, CUDA IPC there.

A backend hands out blocks, uint8 tensors [nbytes] that start at multiples of 256 bytes: block 0 is static (a
canary, then the frozen tensors), block 1 + i is slot i.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from async_grpo_ipc.errors import IPCError
from async_grpo_ipc.fields import CANARY_BYTES as CANARY_BYTES
from async_grpo_ipc.staging import Staging

Way = Literal["auto", "ipc", "host"]  # how weights of a GPU are shared
logger = logging.getLogger(__name__)

FEWEST_SLOTS = 2  # one to read and one to write
FEWER_SLOTS = "%s has room for %d versions of the weights instead of %d: readers may delay new ones."


class ExportedMemory(Protocol):
    """Memory that this process allocated and publishes."""

    blocks: Sequence[Tensor]
    survives_exporter: bool  # whether readers may go on reading after this process has ended

    def describe(self) -> dict[str, Any]:
        """What a reader needs in order to map it: the `memory` object of the handle file."""
        ...

    def synchronize(self) -> None:
        """Return when everything written so far can be seen by readers."""
        ...

    def close(self, *, in_use: bool) -> None:
        """Give the memory back, or leave it to the end of the process where readers could still touch freed memory."""
        ...


class AttachedMemory(Protocol):
    """Another process's memory, mapped here."""

    blocks: Sequence[Tensor]
    alias_device: torch.device | None  # whose models may alias it; None where every access would cross a bus
    staging: Staging | None  # what copies go through where the reader's GPU cannot reach the owner's
    survives_exporter: bool  # whether reading stays safe after the exporter's death

    def synchronize(self) -> None:
        """Return when every read started so far is done."""
        ...

    def close(self) -> None: ...


def canary(generation: str, block: int) -> bytes:
    """The first 4096 bytes of a block: SHAKE-256 of the generation's 16 bytes and the block's number, in 4 bytes. A
    mapping that shows anything else is broken, or is of other memory.
    """
    return hashlib.shake_256(bytes.fromhex(generation) + block.to_bytes(4, "little")).digest(CANARY_BYTES)


def allocate(device: torch.device, generation: str, block_bytes: Sequence[int], way: Way = "auto") -> ExportedMemory:
    """Blocks of these sizes that other processes can map, for tensors of `device`, each with its canary written.

    A GPU without memory for all of them gives the first ones, the static block and at least `FEWEST_SLOTS` slots.

    Args:
        way: memory of the GPU where it can be shared, else of the host ("auto"); or one of the two.

    Raises:
        IPCError: `way` is "ipc", and the memory of this device cannot be shared so.
    """
    memory = _allocate(device, generation, block_bytes, way)
    for number, block in enumerate(memory.blocks):
        block[:CANARY_BYTES] = torch.frombuffer(bytearray(canary(generation, number)), dtype=torch.uint8)
    memory.synchronize()
    return memory


def _allocate(device: torch.device, generation: str, block_bytes: Sequence[int], way: Way) -> ExportedMemory:
    from async_grpo_ipc.memory.posix import PosixExport

    if way == "ipc" and device.type != "cuda":
        raise IPCError(f"The weights are on {device}, and only a GPU's memory is shared by CUDA IPC. Take 'auto'.")
    on_gpu = _in_gpu_memory(device, block_bytes, way) if device.type == "cuda" and way != "host" else None
    return on_gpu or PosixExport(device, generation, block_bytes)


def _in_gpu_memory(device: torch.device, block_bytes: Sequence[int], way: Way) -> ExportedMemory | None:
    """None where the GPU's memory cannot be shared, or does not suffice: which it is, is logged in one line."""
    from async_grpo_ipc.memory.cuda import CudaExport
    from async_grpo_ipc.memory.cuda_runtime import is_out_of_memory, why_not

    reason = why_not(device)
    if reason is None:
        for blocks in range(len(block_bytes), 0, -1):
            try:
                exported = CudaExport(device, block_bytes[:blocks])
            except RuntimeError as error:  # cupy's CUDARuntimeError
                reason = f"{sum(block_bytes[:blocks]) / 2**30:.2f} GiB of its own cannot be shared ({error})"
                if is_out_of_memory(error) and blocks > 1 + FEWEST_SLOTS:
                    continue
                break
            if blocks < len(block_bytes):
                logger.warning(FEWER_SLOTS, torch.cuda.get_device_name(device), blocks - 1, len(block_bytes) - 1)
            return exported
    name = torch.cuda.get_device_name(device)
    if way == "ipc":
        raise IPCError(f"Weights of {name} cannot be shared by CUDA IPC: {reason}. Take 'auto' or 'host'.")
    logger.warning("Weights of %s are published in host memory, which is slower: %s.", name, reason)
    return None


def attach(description: Mapping[str, Any], pid: int, device: torch.device | None) -> AttachedMemory:
    """Map what an exporter's `describe()` said, from process `pid`, to be read by `device` (by default the current)."""
    if description["kind"] == "cuda":
        from async_grpo_ipc.memory.cuda import CudaAttachment

        return CudaAttachment(description, pid, device)
    from async_grpo_ipc.memory.posix import PosixAttachment

    return PosixAttachment(description, pid, device)
