"""Which devices there are, and how a process is held to one of them. Needs no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import MutableMapping

from async_grpo.errors import UsageError

CPU = "cpu"


def visible_gpus() -> int:
    """How many GPUs the CUDA driver shows under the current `CUDA_VISIBLE_DEVICES`; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def parse_device(text: str, gpus: int) -> str:
    """`"cpu"` or the index of a visible GPU, as text.

    Raises:
        UsageError: the text is neither, or there is no such GPU.
    """
    if text == CPU:
        return CPU
    if not text.isdecimal():
        raise UsageError(f"--device must be a GPU index or 'cpu', got {text!r}.")
    if gpus == 0:
        raise UsageError(f"GPU {text} was asked for, but no CUDA GPU is visible here. Use --device cpu.")
    if int(text) >= gpus:
        raise UsageError(f"There is no GPU {text}: {gpus} visible, so the indices are 0 to {gpus - 1}.")
    return str(int(text))


def hold_to_device(device: str, env: MutableMapping[str, str]) -> None:
    """Make `device` the only one that a process with this environment sees (call it before torch is imported).

    An index counts within the `CUDA_VISIBLE_DEVICES` that is already set, as CUDA itself counts.
    """
    if device == CPU:
        env["CUDA_VISIBLE_DEVICES"] = ""
        return
    given = env.get("CUDA_VISIBLE_DEVICES")
    env["CUDA_VISIBLE_DEVICES"] = given.split(",")[int(device)].strip() if given else device


def check_torch_sees(device: str) -> None:
    """Raise `UsageError` when a GPU is meant but torch cannot use one (a CPU build, a driver too old)."""
    if device == CPU:
        return
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"GPU {device} was asked for, but torch {torch.__version__} cannot use it. Install a CUDA build of "
            "torch that fits the driver, or use --device cpu."
        )


def threads_per_process(processes: int) -> int:
    """A fair share of the cores for each of `processes`, at least one thread."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
