"""Blocks in one memfd: for CPUs, and for GPUs that cannot do CUDA IPC."""

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from mmap import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo_ipc import memfd
from async_grpo_ipc.layout import align
from async_grpo_ipc.memory import cuda_runtime
from async_grpo_ipc.staging import Staging

logger = logging.getLogger(__name__)


class PosixExport:
    """One memfd with a page-aligned range for each block."""

    survives_exporter = True

    def __init__(self, device: torch.device, generation: str, block_bytes: Sequence[int]) -> None:
        ends = list(accumulate(align(nbytes, memfd.PAGE_BYTES) for nbytes in block_bytes))
        self._ranges = list(zip([0, *ends[:-1]], block_bytes, strict=True))
        self._nbytes = ends[-1]
        self._fd, mapping = memfd.create(f"weights-{generation}", self._nbytes)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
        self._source_device = device
        self._pinned = whole if device.type == "cuda" and _pin(whole, device) else None
        self.blocks: Sequence[Tensor] = [whole[start : start + nbytes] for start, nbytes in self._ranges]

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "posix",
            "fd": self._fd.fileno(),
            "inode": os.fstat(self._fd.fileno()).st_ino,
            "nbytes": self._nbytes,
            "blocks": [{"offset": start, "nbytes": nbytes} for start, nbytes in self._ranges],
        }

    def synchronize(self) -> None:
        """Stores by a CPU are seen in order by a process that takes the slot's lock afterwards; a GPU's are awaited."""
        if self._source_device.type == "cuda":
            torch.cuda.synchronize(self._source_device)

    def close(self, *, in_use: bool) -> None:
        """Tensors and readers keep the mapping, so it does not matter whether there are any."""
        self.blocks = []
        if self._pinned is not None:
            self.synchronize()
            cuda_runtime.unpin(self._pinned, self._source_device)
            self._pinned = None
        self._fd.close()


class PosixAttachment:
    """A read-only mapping of an exporter's memfd. Every tensor made from it keeps the mapping alive.

    It is pinned for a process that reads it with a GPU: a copy out of pageable memory goes through a buffer of the
    driver.
    """

    survives_exporter = True
    staging: Staging | None = None

    def __init__(self, description: Mapping[str, Any], pid: int, device: torch.device | None) -> None:
        mapping = memfd.attach(pid, description["fd"], description["inode"], description["nbytes"])
        whole = torch.from_numpy(np.asarray(_MappedBytes(mapping)))
        ranges = [(block["offset"], block["nbytes"]) for block in description["blocks"]]
        self.blocks: Sequence[Tensor] = [whole[start : start + nbytes] for start, nbytes in ranges]
        self.alias_device: torch.device | None = torch.device("cpu")
        self._gpu = _reading_gpu(device)
        self._pinned = whole if self._gpu is not None and _pin(whole, self._gpu, read_only=True) else None

    def synchronize(self) -> None:
        """Reads by a CPU are done when the call that made them returns; copies to a GPU are awaited."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not annotate it
            torch.cuda.synchronize()

    def close(self) -> None:
        self.blocks = []
        if self._pinned is not None:
            assert self._gpu is not None
            self.synchronize()
            cuda_runtime.unpin(self._pinned, self._gpu)
            self._pinned = None


def _reading_gpu(device: torch.device | None) -> torch.device | None:
    """The GPU that a reader was said to have, else the current one of a process that uses one already."""
    if device is not None:
        return device if device.type == "cuda" else None
    return torch.device("cuda") if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # as above


class _MappedBytes:
    """Gives numpy a mapping without the read-only mark, which torch would warn of for every tensor. The
    kernel enforces it.
    """

    def __init__(self, mapping: mmap) -> None:
        self._mapping = mapping
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        self.__array_interface__ = {
            "version": 3,
            "shape": (len(mapping),),
            "typestr": "|u1",
            "data": (address, False),
        }


def _pin(whole: Tensor, device: torch.device, *, read_only: bool = False) -> bool:
    """Let a GPU copy to or from the mapping without a detour. Without it everything works, at about half the speed."""
    reason = cuda_runtime.pin(whole, device, read_only=read_only)
    if reason is not None:
        taking = "reading" if read_only else "publishing"
        logger.warning("The shared memory could not be pinned (%s): %s takes longer.", reason, taking)
    return reason is None
