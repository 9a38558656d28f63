"""The memory that stages have had, by which the next ones like them are packed; and their time and use of GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

from async_grpo.errors import BadFileError, DiskFullError
from async_grpo.formatting import size
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import read_shaped, shaped
from async_grpo_experiments.runner.config import DEFAULT_BATCH, ExperimentConfig
from async_grpo_experiments.runner.graph import Stage, kind_of
from async_grpo_experiments.slots import gpu_usage
from async_grpo_experiments.slots.places import Place

MARGIN = 1.1  # of a measured peak
USAGE = "usage.json"
SAMPLE_S = 1.0
_Numbers = TypeVar("_Numbers", dict[str, int], dict[str, float])


class BatchMemory(NamedTuple):
    """Bytes of a stage at its peak, on its device, with a batch of so many rows."""

    rows: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """Bytes of one stage of a kind, by the rules of `checks.plan.memory`."""

    memory: list[BatchMemory]  # with its batch, and with halves of it
    disk: int  # of what it leaves, while it still has a copy that a next attempt would continue from

    @property
    def needed(self) -> int:
        return self.memory[0].nbytes

    def fitting(self, memory: int, measured: int) -> BatchMemory | None:
        """The largest batch that fits, where `measured` bytes are those of the configured one. None: none does."""
        scaled = (BatchMemory(rows, nbytes * measured // self.needed) for rows, nbytes in self.memory)
        return next((one for one in scaled if one.nbytes <= memory), None)


class BatchKey(NamedTuple):
    """The key that the memory of a stage grows with, and its value."""

    name: str
    rows: int


def smaller_batches(stage: Stage, config: ExperimentConfig) -> Iterator[int]:
    """The batch of a stage, and halves of it that the configuration may have."""
    rows, whole = batch_of(stage, config).rows, batch_size_of(stage, config)
    while rows:
        if stage.kind != "train" or whole % (rows * config.system.gpus_per_job) == 0:
            yield rows
        rows //= 2


def batch_size_of(stage: Stage, config: ExperimentConfig) -> int:
    """The rows of one step of a training."""
    return int(config.algos.get(stage.job.algo, {}).get("batch_size", DEFAULT_BATCH))


def batch_of(stage: Stage, config: ExperimentConfig) -> BatchKey:
    if stage.kind == "train":
        return BatchKey("training.micro_batch_size", config.training.micro_batch_size)
    return BatchKey("generation.batch_size", config.generation.batch_size)


class MemoryPeaks:
    """The largest memory that each kind of stage has had, for all experiments of one outputs folder.

    Attributes:
        estimates: bytes of kinds that have not run yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._peaks = path, _numbers(path, dict[str, int])
        self.estimates: dict[str, int] = {}

    def __contains__(self, kind: str) -> bool:
        return kind in self._peaks

    def needed(self, stage: Stage, config: ExperimentConfig) -> int | None:
        """Bytes to reserve; None: unknown, so it gets its place alone."""
        kind = kind_of(stage, config)
        peak = self._peaks.get(kind, self.estimates.get(kind))
        return None if peak is None or config.system.gpus_per_job > 1 else int(peak * MARGIN)

    def peak_of(self, stage: Stage, folder: Path, config: ExperimentConfig, seen: int = 0) -> int:
        """What was seen of a stage, or what it has written of itself in `usage.json`; kept for the next one like it."""
        peak = seen
        with suppress(FileNotFoundError, BadFileError):
            peak = max(seen, shaped(int, read_object(folder / USAGE).get("peak_bytes")))
        key = kind_of(stage, config)
        if peak > self._peaks.get(key, 0):
            self._peaks[key] = peak
            with suppress(DiskFullError):  # it costs a better packing later, no stage
                write_json(self._path, self._peaks)
        return peak


class StageSeconds:
    """How long the last stage of each kind took, for all experiments of one outputs folder."""

    def __init__(self, path: Path) -> None:
        self._path, self.by_kind = path, _numbers(path, dict[str, float])

    def note(self, seconds: Mapping[str, float]) -> None:
        """Keep what these kinds of stages took."""
        self.by_kind |= seconds
        with suppress(DiskFullError):  # it costs a forecast
            write_json(self._path, self.by_kind)


def _numbers(path: Path, shape: type[_Numbers]) -> _Numbers:
    """Read numbers by kind of stage; none where the file is missing or damaged, as they are measured again."""
    return read_shaped(shape, path) or shape()


def way_out(stage: Stage, config: ExperimentConfig, place: Place) -> str:
    """What would need less memory than a place has: `GPU 0 (80 GB): set algos.PITA.batch_size=12, …`."""
    training, algo = config.training, stage.job.algo
    found = []
    if stage.kind == "train":
        each = training.micro_batch_size * config.system.gpus_per_job
        half = batch_size_of(stage, config) // 2 // each * each
        found += [f"algos.{algo}.batch_size={half}"] if half else []
        found += [f"training.micro_batch_size={rows}" for rows in islice(smaller_batches(stage, config), 1, 2)]
        found += [] if training.gradient_checkpointing else ["training.gradient_checkpointing=true"]
    elif config.generation.batch_size > 1:
        found.append(f"generation.batch_size={config.generation.batch_size // 2}")
    *others, last = found or ["a smaller model"]
    taken = gpu_usage.memory(place.gpus)
    where = f"GPU {','.join(place.gpus)}" if place.gpus else place.name
    where += "" if taken is None else f" ({taken.total / 1e9:.0f} GB)"
    return f"{where}: set {' or '.join(filter(None, [', '.join(others), last]))}"


@dataclass(slots=True)
class StageUse:
    """What was seen of one stage."""

    percents: list[float] = field(default_factory=list)  # utilisation of its GPUs at each sample
    peak_bytes: int = 0  # the most that was taken of one of its GPUs besides what others had before; 0: it shared them
    most: dict[str, gpu_usage.GpuMemory] = field(default_factory=dict)  # taken of each GPU, also by others

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
            if (percent := gpu_usage.mean_percent(gpus)) is not None:
                use.percents.append(percent)
            found = {gpu: taken for gpu in gpus if (taken := gpu_usage.memory([gpu])) is not None}
            for gpu, taken in found.items():
                use.most[gpu] = max(use.most.get(gpu, taken), taken)
            if any({*self.gpus_of(other)} & {*gpus} for name, other in running.items() if name != stage):
                use.peak_bytes, self._before[stage] = 0, {}
                continue
            before = self._before.setdefault(stage, {gpu: taken.used for gpu, taken in found.items()})
            more = [taken.used - before[gpu] for gpu, taken in found.items() if gpu in before]
            use.peak_bytes = max([use.peak_bytes, *more])

    def take(self, stage: str) -> StageUse:
        self._before.pop(stage, None)
        return self._uses.pop(stage, StageUse())

    def gpus_of(self, place: str) -> list[str]:
        return [gpu for name in place.split("+") for gpu in self._gpus.get(name, ())]

    def summary(self) -> str:
        """`GPU 0 87%, 45.2 of 80.0 GB | GPU 1 …`; empty without a driver."""
        found = []
        for gpu in dict.fromkeys(gpu for gpus in self._gpus.values() for gpu in gpus):
            percent, taken = gpu_usage.mean_percent([gpu]), gpu_usage.memory([gpu])
            words = [] if percent is None else [f"{percent:.0f}%"]
            words += [] if taken is None else [f"{size(taken.used)} of {size(taken.total)}"]
            found += [f"GPU {gpu} {', '.join(words)}"] if words else []
        return " | ".join(found)
