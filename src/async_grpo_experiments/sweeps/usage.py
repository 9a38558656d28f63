"""What the processes of a run use: cores, between two looks, or its GPUs, as their driver says."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from async_grpo.setup.devices import physical_gpus


class _Spent(NamedTuple):
    at: float  # monotonic
    cpu_s: float


class Usage:
    """Cores and GPUs in use by the runs of a sweep. Nothing here waits."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: dict[str, _Spent] = {}  # by run

    def of(self, run: str, pids: Sequence[int], gpus: Sequence[str]) -> str:
        """`GPU 87%`, or `1.8 cores` of a run without GPUs; empty at the first look."""
        return _gpu_use(gpus) if gpus else self._cores(run, pids)

    def _cores(self, run: str, pids: Sequence[int]) -> str:
        spent, before = _Spent(self._now(), sum(map(_cpu_s, pids))), self._last.get(run)
        self._last[run] = spent
        if before is None or spent.cpu_s < before.cpu_s or spent.at <= before.at:
            return ""
        return f"{(spent.cpu_s - before.cpu_s) / (spent.at - before.at):.1f} cores"


def _gpu_use(gpus: Sequence[str]) -> str:
    """The mean of some GPUs, which count within CUDA_VISIBLE_DEVICES."""
    percents = [percent for name in physical_gpus(gpus, os.environ) if (percent := _percent(name)) is not None]
    return f"GPU {sum(percents) / len(percents):.0f}%" if percents else ""


def _percent(gpu: str) -> int | None:
    """How long a GPU computed of the time shortly before, by its number or UUID; None where the driver does not say."""
    if (driver := _driver()) is None:
        return None
    with suppress(driver.NVMLError):
        find = driver.nvmlDeviceGetHandleByIndex if gpu.isdecimal() else driver.nvmlDeviceGetHandleByUUID
        handle = find(int(gpu) if gpu.isdecimal() else gpu)
        return int(driver.nvmlDeviceGetUtilizationRates(handle).gpu)
    return None


@functools.cache
def _driver() -> Any:
    """The library of the driver, begun for this process; None where there is none."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml
    return None


def _cpu_s(pid: int) -> float:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
