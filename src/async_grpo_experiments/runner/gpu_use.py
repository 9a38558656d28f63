"""How busy the GPUs of running stages are, and how much memory a stage takes that has its GPUs alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from async_grpo.formatting import size
from async_grpo_experiments.slots import gpu_driver
from async_grpo_experiments.slots.places import Place

SAMPLE_S = 1.0


@dataclass(slots=True)
class StageUse:
    """What was seen of one stage.

    Attributes:
        percents: utilisation of its GPUs at each sample.
        peak_bytes: the most that was taken of one of its GPUs besides what others had before; 0: it shared them.
        most: what was taken of each GPU at most, also by others.
    """

    percents: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    most: dict[str, gpu_driver.GpuMemory] = field(default_factory=dict)

    def in_words(self) -> str:
        return f"{fmean(self.percents):.0f}%" if self.percents else "unknown"

    def memory_summary(self) -> str:
        """`GPU Memory Summary:` and a line for each GPU; empty without a driver."""
        lines = [
            f"  GPU {gpu}: {taken.used / 1e9:.2f} GB taken at most, {taken.total / 1e9:.2f} GB total\n"
            for gpu, taken in self.most.items()
        ]
        return "".join(["GPU Memory Summary:\n", *lines]) if lines else ""


class GpuUse:
    """Samples the GPUs of running stages, once a second at most. Nothing here waits."""

    def __init__(self, places: Sequence[Place], now: Callable[[], float] = time.monotonic) -> None:
        self._gpus = {place.name: place.gpus for place in places if place.gpus}
        self._now, self._next = now, 0.0
        self._uses: dict[str, StageUse] = {}  # by the stage's name
        self._before: dict[str, dict[str, int]] = {}  # bytes that others had of each GPU when it was alone there first

    def __bool__(self) -> bool:
        return bool(self._gpus)

    def look(self, running: Mapping[str, str]) -> None:
        """Sample where it is time to. `running` has the places of stages: names of several are joined by +."""
        if not self or self._now() < self._next:
            return
        self._next = self._now() + SAMPLE_S
        for stage, place in running.items():
            use, gpus = self._uses.setdefault(stage, StageUse()), self.gpus_of(place)
            if (percent := gpu_driver.mean_percent(gpus)) is not None:
                use.percents.append(percent)
            found = {gpu: taken for gpu in gpus if (taken := gpu_driver.memory([gpu])) is not None}
            for gpu, taken in found.items():
                use.most[gpu] = max(use.most.get(gpu, taken), taken)
            if any({*self.gpus_of(other)} & {*gpus} for name, other in running.items() if name != stage):
                use.peak_bytes, self._before[stage] = 0, {}
                continue
            before = self._before.setdefault(stage, {gpu: taken.used for gpu, taken in found.items()})
            more = [taken.used - before[gpu] for gpu, taken in found.items() if gpu in before]
            use.peak_bytes = max([use.peak_bytes, *more])

    def take(self, stage: str) -> StageUse:
        """What was seen of a stage that has ended."""
        self._before.pop(stage, None)
        return self._uses.pop(stage, StageUse())

    def gpus_of(self, place: str) -> list[str]:
        return [gpu for name in place.split("+") for gpu in self._gpus.get(name, ())]

    def summary(self) -> str:
        """`GPU 0 87%, 45.2 of 80.0 GB | GPU 1 …`; empty without a driver."""
        found = []
        for gpu in dict.fromkeys(gpu for gpus in self._gpus.values() for gpu in gpus):
            percent, taken = gpu_driver.mean_percent([gpu]), gpu_driver.memory([gpu])
            words = [] if percent is None else [f"{percent:.0f}%"]
            words += [] if taken is None else [f"{size(taken.used)} of {size(taken.total)}"]
            found += [f"GPU {gpu} {', '.join(words)}"] if words else []
        return " | ".join(found)
