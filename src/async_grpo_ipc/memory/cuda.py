"""Blocks in GPU memory, shared by CUDA IPC: one raw allocation a block, so that a handle is the start of its
memory.

What happens when the exporter dies while a reader has its memory mapped is not documented by NVIDIA. So it
counts as lost: no lease is given and no pull is believed after the owner's lock is free (`survives_exporter =
False`).
"""

import functools
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from async_grpo_ipc.errors import AttachError, NoRoomError
from async_grpo_ipc.layout import align
from async_grpo_ipc.memfd import exporter_gone
from async_grpo_ipc.memory.cuda_runtime import CudaRuntime, is_out_of_memory, load_runtime
from async_grpo_ipc.staging import Staging

logger = logging.getLogger(__name__)

# The driver packs smaller allocations together, and a handle would also show the neighbours.
ALLOCATION_BYTES = 2 << 20
NO_PEER = "_ASYNC_GRPO_IPC_NO_PEER"  # for our tests: a machine with one GPU has no peer to be denied


class CudaExport:
    """Raw allocations on one GPU, and their IPC handles.

    Raises:
        RuntimeError: there is no memory for them, or no handle; nothing is left allocated.
    """

    survives_exporter = False

    def __init__(self, device: torch.device, block_bytes: Sequence[int]) -> None:
        self._runtime = load_runtime()
        self._device = self._runtime.current_device() if device.index is None else device.index
        self._pointers: list[int] = []
        try:
            for nbytes in block_bytes:
                self._pointers.append(self._malloc(align(nbytes, ALLOCATION_BYTES)))
            self._handles = [self._runtime.handle_of(self._device, pointer).hex() for pointer in self._pointers]
        except RuntimeError:
            self._free()
            raise
        self.blocks: Sequence[Tensor] = [
            self._runtime.tensor(self._device, pointer, nbytes, self)
            for pointer, nbytes in zip(self._pointers, block_bytes, strict=True)
        ]
        _own_blocks.update(zip(self._handles, self.blocks, strict=True))

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "cuda",
            "device_uuid": self._runtime.uuid(self._device),
            "device_name": self._runtime.name(self._device),
            "blocks": [
                {"handle": handle, "nbytes": block.numel()}
                for handle, block in zip(self._handles, self.blocks, strict=True)
            ],
        }

    def synchronize(self) -> None:
        self._runtime.synchronize(self._device)

    def close(self, *, in_use: bool) -> None:
        for handle in self._handles:
            _own_blocks.pop(handle, None)
        self.blocks = []
        if in_use:
            logger.info("The weights' GPU memory is still in use, so it is freed when this process ends.")
            self._pointers = []
            return
        self.synchronize()
        self._free()

    def _malloc(self, nbytes: int) -> int:
        """Memory that torch keeps for later use counts as taken here: torch is asked for it before this gives up."""
        try:
            return self._runtime.malloc(self._device, nbytes)
        except RuntimeError:
            self._runtime.empty_cache()
            return self._runtime.malloc(self._device, nbytes)

    def _free(self) -> None:
        pointers, self._pointers = self._pointers, []
        for pointer in pointers:
            self._runtime.free(self._device, pointer)


_own_blocks: dict[str, Tensor] = {}  # by handle: a process cannot open what it exported itself


def _own_block(handle: str, pid: int) -> Tensor:
    if handle not in _own_blocks:
        raise exporter_gone(pid)
    return _own_blocks[handle]


class _Import:
    """One opened handle. It is closed when the last tensor made from it has gone."""

    def __init__(self, runtime: CudaRuntime, device: int, handle: bytes) -> None:
        self.pointer = runtime.open_handle(device, handle)
        closing = weakref.finalize(self, runtime.close_handle, device, self.pointer)
        closing.atexit = False  # at exit the context may be gone before us; the driver closes what is left


_imports: "weakref.WeakValueDictionary[tuple[int, str], _Import]" = weakref.WeakValueDictionary()


class CudaAttachment:
    """Another process's GPU memory, mapped on the device that will read it."""

    survives_exporter = False

    def __init__(self, description: Mapping[str, Any], pid: int, device: torch.device | None) -> None:
        self._runtime = runtime = _runtime_or_say_why()
        owner = _find_device(runtime, description["device_uuid"])
        reader = _reading_device(runtime, device, owner)
        reachable = _can_reach(runtime, reader, owner)
        self._device = reader if reachable or owner is None else owner
        self.alias_device = runtime.torch_device(reader) if reachable and reader == owner else None
        self.staging: Staging | None = None
        if not reachable and owner is not None:
            _say_that_it_goes_through_the_host(runtime.name(reader), reader, description["device_name"], owner)
            self.staging = runtime.staging(owner, reader)
        blocks = description["blocks"]
        if pid == os.getpid():
            self.blocks: Sequence[Tensor] = [_own_block(block["handle"], pid) for block in blocks]
        else:
            self.blocks = [_open(runtime, self._device, block, description) for block in blocks]

    def synchronize(self) -> None:
        self._runtime.synchronize(self._device)

    def close(self) -> None:
        self.blocks = []


def _runtime_or_say_why() -> CudaRuntime:
    try:
        return load_runtime()
    except ImportError as error:
        raise AttachError(
            f"The weights are in GPU memory, and cupy, which maps it, cannot be imported here ({error}). "
            "Install cupy-cuda12x or cupy-cuda13x, as your CUDA is."
        ) from error


def _find_device(runtime: CudaRuntime, uuid: str) -> int | None:
    return next((i for i in range(runtime.device_count()) if runtime.uuid(i) == uuid), None)


def _reading_device(runtime: CudaRuntime, device: torch.device | None, owner: int | None) -> int:
    """The GPU asked for, else the current one; a reader on the CPU reads through the owner's GPU."""
    if runtime.device_count() == 0:
        raise AttachError(
            "The weights are in GPU memory and this process sees no GPU. Check CUDA_VISIBLE_DEVICES and the "
            "driver, or let the exporter publish from the CPU."
        )
    if device is None:
        return runtime.current_device()
    if device.type == "cpu":
        return 0 if owner is None else owner
    return runtime.current_device() if device.index is None else device.index


def _can_reach(runtime: CudaRuntime, reader: int, owner: int | None) -> bool:
    """Whether the reader's GPU can map the owner's memory. Unknown where the owner is hidden from us: we shall see."""
    if os.environ.get(NO_PEER) and owner is not None:
        return False
    return owner is None or reader == owner or runtime.can_access_peer(reader, owner)


@functools.cache  # once a process, however often the exporter is started again
def _say_that_it_goes_through_the_host(reader_name: str, reader: int, owner_name: str, owner: int) -> None:
    logger.warning(
        "GPU %s (%s) cannot access the memory of %s (%s) as a peer. Weights are copied through the host, "
        "which is slower; this process has a context on both.",
        reader,
        reader_name,
        owner,
        owner_name,
    )


def _open(runtime: CudaRuntime, device: int, block: Mapping[str, Any], description: Mapping[str, Any]) -> Tensor:
    key = (device, block["handle"])
    try:
        imported = _imports.get(key)
        if imported is None:
            imported = _imports[key] = _Import(runtime, device, bytes.fromhex(block["handle"]))
        return runtime.tensor(device, imported.pointer, block["nbytes"], imported)
    except RuntimeError as error:  # cupy's CUDARuntimeError, and torch's errors
        if is_out_of_memory(error):
            raise NoRoomError(
                f"GPU {device} ({runtime.uuid(device)}) has no room for what it takes to map weights: {error}. Give "
                "the processes on it less (--num-workers, vllm_gpu_memory_utilization), or start this one again."
            ) from error
        raise AttachError(
            f"GPU {device} ({runtime.uuid(device)}) cannot map the weights on "
            f"{description['device_name']} ({description['device_uuid']}): {error}. Usual reasons: "
            "different containers (share the pid and ipc namespaces), WSL, instances of MIG, or no peer access "
            "between the two GPUs. Publishing through host memory always works: async-grpo's --weights host, or "
            "way='host' of the exporter."
        ) from error
