"""What the processes of a run use: cores, between two looks, or its GPUs, as their driver says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from async_grpo_experiments.slots.gpu_driver import mean_percent


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
        if not gpus:
            return self._cores(run, pids)
        percent = mean_percent(gpus)
        return "" if percent is None else f"GPU {percent:.0f}%"

    def _cores(self, run: str, pids: Sequence[int]) -> str:
        spent, before = _Spent(self._now(), sum(map(_cpu_s, pids))), self._last.get(run)
        self._last[run] = spent
        if before is None or spent.cpu_s < before.cpu_s or spent.at <= before.at:
            return ""
        return f"{(spent.cpu_s - before.cpu_s) / (spent.at - before.at):.1f} cores"


def _cpu_s(pid: int) -> float:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
