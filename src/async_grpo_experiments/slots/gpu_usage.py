"""What the driver says of GPUs, by NVML: how busy they are, and how much of their memory is taken."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

from async_grpo.setup.devices import physical_gpus


class GpuMemory(NamedTuple):
    """Bytes of a GPU, or of several together."""

    used: int
    total: int


def mean_percent(gpus: Sequence[str]) -> float | None:
    """How long some GPUs computed of the time shortly before. They count within CUDA_VISIBLE_DEVICES. None: unknown."""
    found = _answers("nvmlDeviceGetUtilizationRates", gpus)
    return fmean(int(one.gpu) for one in found) if found else None


def memory(gpus: Sequence[str]) -> GpuMemory | None:
    """The memory of some GPUs together. None: the driver does not say it of all of them."""
    found = _answers("nvmlDeviceGetMemoryInfo", gpus)
    if not found or len(found) < len(gpus):
        return None
    return GpuMemory(sum(int(one.used) for one in found), sum(int(one.total) for one in found))


def _answers(question: str, gpus: Sequence[str]) -> list[Any]:
    """What the driver answers of these GPUs. It is silent of some: of a part of one (MIG) it says no utilisation."""
    found: list[Any] = []
    if (driver := _driver()) is None:
        return found
    for name in physical_gpus(gpus, os.environ):
        find = driver.nvmlDeviceGetHandleByIndex if name.isdecimal() else driver.nvmlDeviceGetHandleByUUID
        with suppress(driver.NVMLError):
            found.append(getattr(driver, question)(find(int(name) if name.isdecimal() else name)))
    return found


@functools.cache
def _driver() -> Any:
    """The library of the driver, begun for this process; None where there is none."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml
    return None
