"""The few calls of the CUDA runtime that are needed, as a Protocol, and their implementation by cupy and
torch.

cupy and not torch, because a handle of torch's caching allocator points into a pool (with
`expandable_segments` there is no handle at all), and because torch's own sharing counts one consumer per
handle while a handle file has any number of readers.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
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

    def empty_cache(self) -> None:
        """Let torch give back what it has allocated and does not use."""
        ...


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

    @contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """Make this GPU current, for torch first: cupy makes the GPU current again that it found, and that creates a
        context there (CUDA 12 and later). torch leaves no context where there was none.
        """
        with torch.cuda.device(device), self._cupy.cuda.Device(device):
            yield

    def malloc(self, device: int, nbytes: int) -> int:
        with self._current(device):
            return int(self._runtime.malloc(nbytes))

    def free(self, device: int, pointer: int) -> None:
        with self._current(device):
            self._runtime.free(pointer)

    def handle_of(self, device: int, pointer: int) -> bytes:
        with self._current(device):
            return bytes(self._runtime.ipcGetMemHandle(pointer))

    def open_handle(self, device: int, handle: bytes) -> int:
        torch.zeros(1, dtype=torch.uint8, device=f"cuda:{device}")  # torch's context exists before cupy uses it
        with self._current(device):
            return int(self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))

    def close_handle(self, device: int, pointer: int) -> None:
        with self._current(device):
            self._runtime.ipcCloseMemHandle(pointer)

    def can_access_peer(self, device: int, owner: int) -> bool:
        return bool(self._runtime.deviceCanAccessPeer(device, owner))

    def staging(self, owner: int, reader: int) -> Staging:
        return cuda_staging(self.torch_device(owner), self.torch_device(reader))

    def tensor(self, device: int, pointer: int, nbytes: int, owner: object) -> Tensor:
        """The driver is not asked about the pointer, as `__dlpack__` would: what it says of memory on a GPU that is
        hidden from this process is not documented.
        """
        on = self.torch_device(device)
        storage = torch._C._construct_storage_from_data_pointer(pointer, on, nbytes)
        storage.owner = owner  # type: ignore[attr-defined]  # lives, as `storage` does, as long as a tensor of it
        return torch.empty(0, dtype=torch.uint8, device=on).set_(storage, 0, (nbytes,), (1,))

    def synchronize(self, device: int) -> None:
        torch.cuda.synchronize(device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


@functools.cache
def load_runtime() -> CudaRuntime:
    """Raises ImportError without cupy."""
    return CupyRuntime()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether this error of cupy or torch says that the GPU's memory does not suffice."""
    return "out of memory" in str(error)


PROBE_BYTES = 2 << 20


def why_not(device: torch.device) -> str | None:
    """Why memory of this GPU cannot be shared by CUDA IPC, None where a small piece of it was just given a handle.

    That a handle can be had does not say that another process can open it: only a process that tries can tell.
    """
    try:
        runtime = load_runtime()
    except ImportError as error:
        return f"cupy cannot be imported ({error}); install cupy-cuda12x or cupy-cuda13x, as your CUDA is"
    if "microsoft" in Path("/proc/version").read_text(encoding="utf-8").lower():
        return "WSL has no CUDA IPC"
    index = runtime.current_device() if device.index is None else device.index
    return _why_no_handle(runtime, index)


def _why_no_handle(runtime: CudaRuntime, device: int) -> str | None:
    try:
        pointer = runtime.malloc(device, PROBE_BYTES)
    except RuntimeError:
        return None  # no memory: whoever needs more of it will say so
    try:
        runtime.handle_of(device, pointer)
    except RuntimeError as error:  # cupy's CUDARuntimeError
        return f"the driver gives no handle for its memory ({error})"
    finally:
        runtime.free(device, pointer)
    return None


READ_ONLY = 8  # cudaHostRegisterReadOnly: memory that is mapped read-only is not registered without it


def pin(memory: Tensor, device: torch.device, *, read_only: bool = False) -> str | None:
    """Lock this host memory, so that the GPU copies to and from it without a detour. Returns why it could not be done.

    Args:
        read_only: it is mapped so. Not every GPU takes that (`cudaDevAttrHostRegisterReadOnlySupported`).
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch does not annotate it
    with torch.cuda.device(device):  # the call makes a context on the GPU that is current
        status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), READ_ONLY if read_only else 0))
    if status == 0:
        return None
    with suppress(RuntimeError):  # the failed call leaves its error behind, and the next kernel would raise it
        torch.ones(1, dtype=torch.uint8, device=device)
    return f"CUDA error {status}"


def unpin(memory: Tensor, device: torch.device) -> None:
    """Before memory that was pinned is unmapped."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]  # as above
