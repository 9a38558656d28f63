"""What a run is to do. `run.json` keeps it, and every process of the run reads it there."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from async_grpo.settings import CPU, Eta, LaunchSettings, TrainingSettings, Way, WorkerSettings

OF_ONE_START = ("resume", "overwrite", "machine_rank", "main_process")  # and of no later one


@dataclass(frozen=True, slots=True)
class TRLCall:
    """What `trl grpo` would be called with, and the folder in which: relative paths are relative to it."""

    arguments: list[str]
    directory: str


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What `generate` samples, and where its rows go."""

    out: Path  # a folder, absolute
    samples: int | None = None  # of each problem; None: the setup file's num_generations


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a command line decides about a run: the settings as they were given, and what they came to here."""

    config: Path  # the setup file, absolute
    training: TrainingSettings = field(default_factory=TrainingSettings)
    work: WorkerSettings = field(default_factory=WorkerSettings)  # of the workers that the launcher starts
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    trl: TRLCall | None = None  # what the setup file was written for
    models: tuple[str, ...] = ()  # to evaluate, the first against the second where there are two; trains nothing then
    rows: SampledRows | None = None  # to sample with the only one of `models`
    etas: tuple[Eta, ...] = ()  # strengths of guidance to evaluate them with; none: as the setup file says
    master_device: str = CPU  # or the index of the server's GPU
    worker_devices: tuple[str, ...] = ()  # of the workers that the launcher starts; none: they are started by hand
    weights: Way = "auto"  # what --weights came to
    ranks: int = 1  # processes of the trainer

    @property
    def num_workers(self) -> int:
        return len(self.worker_devices)

    @property
    def workers_sharing(self) -> int:
        """How many workers are on the server's device, and read its weights in place."""
        if self.weights == "host" and self.master_device != CPU:
            return 0
        return self.worker_devices.count(self.master_device)

    @property
    def way_to_workers(self) -> str:
        """What to do where no worker is alive."""
        by_hand = "start one with `async-grpo worker`"
        return by_hand if self.launch.ray is None else f"log_nodes.txt says why no node has any, or {by_hand}"

    def options(self) -> dict[str, Any]:
        """The settings by name, as a later start of the run has them where its command line says nothing."""
        kinds = (self.training, self.work, self.launch)
        return {f.name: getattr(kind, f.name) for kind in kinds for f in fields(kind) if f.name not in OF_ONE_START}
