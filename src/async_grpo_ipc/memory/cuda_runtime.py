"""The few calls of the CUDA runtime that are needed, as a Protocol, and their implementation by cupy and
torch.

cupy and not torch, because a handle of torch's caching allocator points into a pool (with
`expandable_segments` there is no handle at all), and because torch's own sharing counts one consumer per
handle while a handle file has any number of readers.
"""

import functools
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils.dlpack
from torch import Tensor

from async_grpo_ipc.staging import Staging, cuda_staging


class CudaRuntime(Protocol):
    """Devices are indices as this process sees them; pointers and sizes are in bytes."""

    def device_count(self) -> int: ...

    def current_device(self) -> int: ...

    def torch_device(self, device: int) -> torch.device: ...

    def uuid(self, device: int) -> str:
        """`GPU-...`: the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
        ...

    def name(self, device: int) -> str: ...

    def malloc(self, device: int, nbytes: int) -> int: ...

    def free(self, device: int, pointer: int) -> None: ...

    def handle_of(self, device: int, pointer: int) -> bytes:
        """The 64 bytes that another process opens."""
        ...

    def open_handle(self, device: int, handle: bytes) -> int:
        """Map another process's memory with `device` current, peer access enabled where it is another device's."""
        ...

    def close_handle(self, device: int, pointer: int) -> None: ...

    def can_access_peer(self, device: int, owner: int) -> bool: ...

    def staging(self, owner: int, reader: int) -> Staging:
        """Pinned host buffers and streams for copies from one device to the other."""
        ...

    def tensor(self, device: int, pointer: int, nbytes: int, owner: object) -> Tensor:
        """uint8 [nbytes] at `pointer`, as seen from `device`; keeps `owner` alive."""
        ...

    def synchronize(self, device: int) -> None: ...


class CupyRuntime:
    """The real one."""

    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy
        self._runtime: Any = cupy.cuda.runtime

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cuda", device)

    def uuid(self, device: int) -> str:
        return "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")

    def name(self, device: int) -> str:
        return torch.cuda.get_device_name(device)

    def malloc(self, device: int, nbytes: int) -> int:
        with self._cupy.cuda.Device(device):
            return int(self._runtime.malloc(nbytes))

    def free(self, device: int, pointer: int) -> None:
        with self._cupy.cuda.Device(device):
            self._runtime.free(pointer)

    def handle_of(self, device: int, pointer: int) -> bytes:
        with self._cupy.cuda.Device(device):
            return bytes(self._runtime.ipcGetMemHandle(pointer))

    def open_handle(self, device: int, handle: bytes) -> int:
        torch.zeros(1, device=f"cuda:{device}")  # torch's context exists before cupy uses it
        with self._cupy.cuda.Device(device):
            return int(self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))

    def close_handle(self, device: int, pointer: int) -> None:
        with self._cupy.cuda.Device(device):
            self._runtime.ipcCloseMemHandle(pointer)

    def can_access_peer(self, device: int, owner: int) -> bool:
        return bool(self._runtime.deviceCanAccessPeer(device, owner))

    def staging(self, owner: int, reader: int) -> Staging:
        return cuda_staging(self.torch_device(owner), self.torch_device(reader))

    def tensor(self, device: int, pointer: int, nbytes: int, owner: object) -> Tensor:
        memory = self._cupy.cuda.UnownedMemory(pointer, nbytes, owner, device)
        with self._cupy.cuda.Device(device):
            array = self._cupy.ndarray((nbytes,), self._cupy.uint8, self._cupy.cuda.MemoryPointer(memory, 0))
            tensor: Tensor = torch.utils.dlpack.from_dlpack(array)
        return tensor

    def synchronize(self, device: int) -> None:
        torch.cuda.synchronize(device)


@functools.cache
def load_runtime() -> CudaRuntime:
    """Raises ImportError without cupy."""
    return CupyRuntime()


def why_not(device: torch.device) -> str | None:
    """Why memory of this GPU cannot be shared by CUDA IPC, None where it can."""
    try:
        load_runtime()
    except ImportError as error:
        return f"cupy cannot be imported ({error}); install cupy-cuda12x or cupy-cuda13x, as your CUDA is"
    if "microsoft" in Path("/proc/version").read_text(encoding="utf-8").lower():
        return "WSL has no CUDA IPC"
    if " MIG " in torch.cuda.get_device_name(device):
        return "a MIG instance has no CUDA IPC"
    return None
