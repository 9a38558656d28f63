"""Asks the CUDA driver in a process of its own: `python gpu_driver.py count | export | open`, one JSON object.

`cuInit` reads CUDA_VISIBLE_DEVICES once in the life of a process. A role that counted GPUs itself could not be held to
one of them afterwards, so no process that computes may call what is in here. Run as a script: it imports no package.
"""

from __future__ import annotations

import ctypes
import json
import sys

CANARY = bytes(range(256)) * 16
ALLOCATION_BYTES = 2 << 20
COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]  # ctypes wants it so


class Failure(Exception):
    """A call of the driver did not succeed; the text says which, and with what."""


class Driver:
    """libcuda, with every call checked."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise Failure(f"{name}: {self._text(status)}")

    def _text(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(status, ctypes.byref(text))
        return text.value.decode() if text.value else f"error {status}"

    def count(self) -> int:
        found = ctypes.c_int(0)
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def compute_mode(self, index: int) -> int:
        mode = ctypes.c_int(0)
        self.call("cuDeviceGetAttribute", ctypes.byref(mode), COMPUTE_MODE, self._device(index))
        return mode.value

    def use(self, index: int) -> None:
        """Make the primary context of this GPU current."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(index))
        self.call("cuCtxSetCurrent", context)

    def _device(self, index: int) -> int:
        device = ctypes.c_int(0)
        self.call("cuDeviceGet", ctypes.byref(device), index)
        return device.value


def count() -> dict[str, object]:
    try:
        driver = Driver()
    except (OSError, Failure) as error:
        return {"compute_modes": [], "why": str(error)}
    return {"compute_modes": [driver.compute_mode(index) for index in range(driver.count())]}


def export() -> None:
    """Print the handle of a small allocation with a pattern in it, and keep it until the input ends."""
    driver = Driver()
    driver.use(0)
    pointer, handle = ctypes.c_uint64(), IpcHandle()
    driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(ALLOCATION_BYTES))
    driver.call("cuMemcpyHtoD_v2", pointer, CANARY, ctypes.c_size_t(len(CANARY)))
    driver.call("cuCtxSynchronize")
    driver.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
    print(json.dumps({"handle": bytes(handle.bytes).hex()}), flush=True)
    sys.stdin.read()


def open_handle() -> dict[str, object]:
    """Map what `export` made in another process, once its handle comes as a line, and compare what it shows."""
    driver = Driver()
    driver.use(0)
    handle = IpcHandle.from_buffer_copy(bytes.fromhex(sys.stdin.readline()))
    pointer, seen = ctypes.c_uint64(), ctypes.create_string_buffer(len(CANARY))
    driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, LAZY_PEER_ACCESS)
    driver.call("cuMemcpyDtoH_v2", seen, pointer, ctypes.c_size_t(len(CANARY)))
    if seen.raw != CANARY:
        raise Failure("the mapped memory does not show what was written (peer access through an IOMMU?)")
    return {}


def main() -> None:
    try:
        match sys.argv[1:]:
            case ["count"]:
                print(json.dumps(count()))
            case ["export"]:
                export()
            case ["open"]:
                print(json.dumps(open_handle()))
    except (OSError, Failure, AttributeError) as error:  # AttributeError: a driver without the call
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
