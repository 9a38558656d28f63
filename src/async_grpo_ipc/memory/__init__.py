"""The seam between the protocol and the kind of memory: POSIX shared memory here, CUDA IPC there.

A backend hands out blocks, uint8 tensors [nbytes] that start at multiples of 256 bytes: block 0 is static (a
canary, then the frozen tensors), block 1 + i is slot i.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from async_grpo_ipc.staging import Staging

logger = logging.getLogger(__name__)

CANARY_BYTES = 4096


class ExportedMemory(Protocol):
    """Memory that this process allocated and publishes."""

    blocks: Sequence[Tensor]

    def describe(self) -> dict[str, Any]:
        """What a reader needs in order to map it: the `memory` object of the handle file."""
        ...

    def synchronize(self) -> None:
        """Return when everything written so far can be seen by readers."""
        ...

    def close(self, *, readers_attached: bool) -> None:
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


def canary(generation: str) -> bytes:
    """The first 4096 bytes of block 0: SHAKE-256 of the generation's 16 bytes. A mapping that shows anything
    else is broken.
    """
    return hashlib.shake_256(bytes.fromhex(generation)).digest(CANARY_BYTES)


def allocate(device: torch.device, generation: str, block_bytes: Sequence[int]) -> ExportedMemory:
    """Blocks of these sizes that other processes can map, for tensors of `device`, the canary written."""
    memory = _allocate(device, generation, block_bytes)
    memory.blocks[0][:CANARY_BYTES] = torch.frombuffer(bytearray(canary(generation)), dtype=torch.uint8)
    memory.synchronize()
    return memory


def _allocate(device: torch.device, generation: str, block_bytes: Sequence[int]) -> ExportedMemory:
    from async_grpo_ipc.memory.posix import PosixExport

    if device.type == "cuda":
        from async_grpo_ipc.memory.cuda import CudaExport
        from async_grpo_ipc.memory.cuda_runtime import why_not

        reason = why_not(device)
        if reason is None:
            return CudaExport(device, block_bytes)
        logger.warning("Weights of %s are published in host memory: %s.", torch.cuda.get_device_name(device), reason)
    return PosixExport(device, generation, block_bytes)


def attach(description: Mapping[str, Any], pid: int, device: torch.device | None) -> AttachedMemory:
    """Map what an exporter's `describe()` said, from process `pid`, to be read by `device` (by default the current)."""
    if description["kind"] == "cuda":
        from async_grpo_ipc.memory.cuda import CudaAttachment

        return CudaAttachment(description, pid, device)
    from async_grpo_ipc.memory.posix import PosixAttachment

    return PosixAttachment(description, pid)
