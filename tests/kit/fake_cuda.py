"""The CUDA runtime in shared host memory, for tests that span processes: a handle is the name of a file.

`install` puts it under `async_grpo_ipc` of this process; tensors stay on the CPU and count as GPU memory. Each process
says which GPUs it sees and what fails there (`Knobs`). As on a GPU, memory is lost with the process that allocated it:
here it is overwritten, so that a test notices a reader that believes what it read afterwards.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_grpo_ipc import memory
from async_grpo_ipc.memory import cuda, cuda_runtime
from async_grpo_ipc.staging import Staging

VARIABLE = "FAKE_CUDA"
POISON = 0xA5
# Reads names until its input ends, with the process that holds the other end, and overwrites those files.
POISONER = f"""
import os, sys
for name in filter(os.path.exists, sys.stdin.read().split()):
    size = os.stat(name).st_size
    with open(name, "r+b") as file:
        file.write(b"\\x{POISON:02x}" * size)
    os.unlink(name)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One process's view of the machine, and what fails in it."""

    folder: str  # in shared memory: where all processes of a test keep their "GPU memory"
    gpus: tuple[str, ...] = ("GPU-a",)  # visible here; a GPU that is left out is hidden
    peers: bool = True  # without, memory of a hidden GPU cannot be opened
    open_fails: bool = False
    room: int = 1 << 40  # bytes that can be allocated
    cached: int = 0  # bytes that torch's cache holds, until it is emptied
    handles: int = 1 << 20  # handles that can be had
    pin_fails: bool = False

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


class FakeRuntime:
    """`CudaRuntime`. Handles are 64 bytes, as CUDA's are."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.allocated: dict[int, tuple[Path, mmap.mmap]] = {}  # by address
        self.opened: dict[int, mmap.mmap] = {}
        self.synchronized = 0
        self.cached = knobs.cached
        self.pending: str | None = None  # an error that the next call will raise
        self.pinned: dict[int, int] = {}  # flags, by address
        self.current = 0  # GPU
        self.contexts: set[int] = set()  # GPUs that memory was pinned or unpinned with
        self._serial = 0
        self._handles = knobs.handles
        self._poisoner: subprocess.Popen[str] | None = None

    def device_count(self) -> int:
        return len(self.knobs.gpus)

    def current_device(self) -> int:
        return 0

    def torch_device(self, device: int) -> torch.device:
        return torch.device("cpu")

    def uuid(self, device: int) -> str:
        return self.knobs.gpus[device]

    def name(self, device: int) -> str:
        return f"Fake {self.uuid(device)}"

    def malloc(self, device: int, nbytes: int) -> int:
        self._raise_pending()
        if sum(len(block) for _, block in self.allocated.values()) + nbytes + self.cached > self.knobs.room:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        self._serial += 1
        path = Path(self.knobs.folder) / f"{self.uuid(device)}.{os.getpid()}.{self._serial}"
        path.write_bytes(bytes(nbytes))
        self._lost_with_this_process(path)
        block = _map(path)
        self.allocated[_address(block)] = path, block
        return _address(block)

    def free(self, device: int, pointer: int) -> None:
        _, block = self.allocated.pop(pointer)
        block[:] = bytes([POISON]) * len(block)

    def handle_of(self, device: int, pointer: int) -> bytes:
        self._handles -= 1
        if self._handles < 0:
            raise RuntimeError("cudaErrorNotSupported: operation not supported")
        return self.allocated[pointer][0].name.encode().ljust(64, b"\0")

    def open_handle(self, device: int, handle: bytes) -> int:
        name = handle.rstrip(b"\0").decode()
        if name.split(".")[1] == str(os.getpid()):
            raise RuntimeError("cudaErrorDeviceUninitialized: invalid device context")  # one's own does not open
        hidden = name.split(".")[0] not in self.knobs.gpus
        if self.knobs.open_fails or (hidden and not self.knobs.peers):
            raise RuntimeError("cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices")
        try:
            block = _map(Path(self.knobs.folder) / name)
        except FileNotFoundError:
            raise RuntimeError("cudaErrorMapBufferObjectFailed: mapping of buffer object failed") from None
        self.opened[_address(block)] = block
        return _address(block)

    def close_handle(self, device: int, pointer: int) -> None:
        del self.opened[pointer]

    def can_access_peer(self, device: int, owner: int) -> bool:
        return self.knobs.peers

    def staging(self, owner: int, reader: int) -> Staging:
        raise NotImplementedError

    def tensor(self, device: int, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(_At(pointer, nbytes, owner)))

    def synchronize(self, device: int) -> None:
        self._raise_pending()
        self.synchronized += 1

    def empty_cache(self) -> None:
        self.cached = 0

    # What torch binds of the runtime

    @contextmanager
    def using(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if self.knobs.pin_fails:
            self.pending = "CUDA error: part or all of the requested memory range is already mapped"
            return 712
        self.pinned[pointer] = flags
        self.contexts.add(self.current)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.pinned[pointer]
        self.contexts.add(self.current)
        return 0

    def launch(self, *size: int, device: Any = None, **options: Any) -> torch.Tensor:
        """In the place of `torch.ones`, whose kernel on a GPU raises what an earlier call left."""
        if torch.device(device or "cpu").type == "cuda":
            self._raise_pending()
        return torch.full(size, 1.0, **options)

    def _raise_pending(self) -> None:
        if self.pending is not None:
            text, self.pending = self.pending, None
            raise RuntimeError(text)

    def _lost_with_this_process(self, path: Path) -> None:
        if self._poisoner is None:
            command = [sys.executable, "-I", "-S", "-c", POISONER]
            self._poisoner = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        assert self._poisoner.stdin is not None
        print(path, file=self._poisoner.stdin, flush=True)


class _At:
    """Gives numpy memory at an address, and keeps its owner as long as an array uses it."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _address(block: mmap.mmap) -> int:
    return int(np.frombuffer(block, dtype=np.uint8).ctypes.data)


def install(knobs: Knobs, patch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime(knobs)
    for module in (cuda, cuda_runtime):
        patch.setattr(module, "load_runtime", lambda: runtime)
    cuda._say_that_it_goes_through_the_host.cache_clear()
    allocate, gpu = memory.allocate, torch.device("cuda", 0)
    patch.setattr(memory, "allocate", lambda device, *given: allocate(gpu, *given))
    patch.setattr(torch, "ones", runtime.launch)
    for name, stand_in in {
        "cudart": lambda: runtime,
        "device": runtime.using,
        "synchronize": lambda device=None: runtime.synchronize(0),
        "is_initialized": lambda: True,
        "empty_cache": runtime.empty_cache,
        "get_device_name": lambda device=None: runtime.name(0),
    }.items():
        patch.setattr(torch.cuda, name, stand_in)
    return runtime


def install_if_asked() -> None:
    """For processes of a test: with the knobs that the environment names, until they end."""
    if VARIABLE in os.environ:
        given = json.loads(os.environ[VARIABLE])
        install(Knobs(**{**given, "gpus": tuple(given["gpus"])}), pytest.MonkeyPatch())
