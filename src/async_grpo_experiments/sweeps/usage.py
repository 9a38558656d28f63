"""What the processes of a run use: cores, between two looks, or its GPUs, as `nvidia-smi` says."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from async_grpo.setup.devices import physical_gpus

_ASK = ("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu", "--format=csv,noheader,nounits")


class _Spent(NamedTuple):
    at: float  # monotonic
    cpu_s: float


class Usage:
    """Of the runs of a sweep. Nothing here waits."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: dict[str, _Spent] = {}  # by run
        self._gpus = GpuUse()

    def of(self, run: str, pids: Sequence[int], gpus: Sequence[str]) -> str:
        """`GPU 87%`, or `1.8 cores` of a run without GPUs; empty at the first look."""
        return self._gpus.of(gpus) if gpus else self._cores(run, pids)

    def _cores(self, run: str, pids: Sequence[int]) -> str:
        spent, before = _Spent(self._now(), sum(map(_cpu_s, pids))), self._last.get(run)
        self._last[run] = spent
        if before is None or spent.cpu_s < before.cpu_s or spent.at <= before.at:
            return ""
        return f"{(spent.cpu_s - before.cpu_s) / (spent.at - before.at):.1f} cores"


class GpuUse:
    """The use of each GPU. `nvidia-smi` runs beside us, and its answer is there at a later look."""

    def __init__(self, ask: Sequence[str] = _ASK) -> None:
        self._ask = ask
        self._asked: subprocess.Popen[str] | None = None
        self._percent: dict[str, str] = {}  # by index and by UUID

    def of(self, gpus: Sequence[str]) -> str:
        """The mean of some GPUs, which count within CUDA_VISIBLE_DEVICES."""
        self._look()
        names = physical_gpus(gpus, os.environ)
        found = [float(self._percent[name]) for name in names if self._percent.get(name, "").isdecimal()]
        return f"GPU {sum(found) / len(found):.0f}%" if found else ""

    def _look(self) -> None:
        if self._asked is None:
            with suppress(OSError):  # there is none
                self._asked = subprocess.Popen(
                    self._ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
                )
        elif self._asked.poll() is not None:
            answer, _ = self._asked.communicate()
            self._asked = None
            for line in answer.splitlines():
                index, uuid, percent = ([part.strip() for part in line.split(",")] + ["", "", ""])[:3]
                self._percent |= {index: percent, uuid: percent}


def _cpu_s(pid: int) -> float:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
