"""The memory that stages have had, by which the next ones like them are packed; and the time that they have taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from async_grpo.errors import BadFileError, DiskFullError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import shaped
from async_grpo_experiments.runner.config import DEFAULT_BATCH, ExperimentConfig
from async_grpo_experiments.runner.graph import Stage, kind_of
from async_grpo_experiments.slots import gpu_driver
from async_grpo_experiments.slots.places import Place

MARGIN = 1.1  # of a measured peak
USAGE = "usage.json"
_Numbers = TypeVar("_Numbers", dict[str, int], dict[str, float])


class BatchMemory(NamedTuple):
    """Bytes of a stage at its peak, on its device, with a batch of so many rows."""

    rows: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """Bytes of one stage of a kind, by the rules of `checks.plan.memory`.

    Attributes:
        memory: with its batch, and with halves of it.
        disk: of what it leaves, while it still has a copy that a next attempt would continue from.
    """

    memory: list[BatchMemory]
    disk: int

    @property
    def needed(self) -> int:
        return self.memory[0].nbytes

    def fitting(self, room: int, measured: int) -> BatchMemory | None:
        """The largest batch that fits, where `measured` bytes are those of the configured one. None: none does."""
        scaled = (BatchMemory(rows, nbytes * measured // self.needed) for rows, nbytes in self.memory)
        return next((one for one in scaled if one.nbytes <= room), None)


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
    try:
        return shaped(shape, read_object(path))
    except (FileNotFoundError, BadFileError):
        return shape()


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
    taken = gpu_driver.memory(place.gpus)
    where = f"GPU {','.join(place.gpus)}" if place.gpus else place.name
    where += "" if taken is None else f" ({taken.total / 1e9:.0f} GB)"
    return f"{where}: set {' or '.join(filter(None, [', '.join(others), last]))}"
