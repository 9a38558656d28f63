"""The memory that stages have had, by which the next ones like them are packed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from async_grpo.errors import BadFileError, DiskFullError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import read_object
from async_grpo_experiments.runner.config import ExperimentConfig
from async_grpo_experiments.runner.graph import Stage

MARGIN = 1.1  # of a measured peak


class MemoryPeaks:
    """The largest memory that each kind of stage has had, for all experiments of one outputs folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._peaks = {str(key): int(value) for key, value in read_object(path).items()}
        except (FileNotFoundError, BadFileError, ValueError, TypeError):
            self._peaks = {}

    def needed(self, stage: Stage, config: ExperimentConfig) -> int | None:
        """Bytes to reserve; None: unknown, so it gets its place alone."""
        peak = self._peaks.get(self._key(stage, config))
        return None if peak is None or config.system.gpus_per_job > 1 else int(peak * MARGIN)

    def peak_of(self, stage: Stage, folder: Path, config: ExperimentConfig) -> int:
        """What a stage has written of itself in `usage.json`; kept for the next one like it."""
        try:
            peak = int(read_object(folder / "usage.json")["peak_bytes"])
        except (FileNotFoundError, BadFileError, KeyError, ValueError, TypeError):
            return 0
        key = self._key(stage, config)
        if peak > self._peaks.get(key, 0):
            self._peaks[key] = peak
            with suppress(DiskFullError):  # it costs a better packing later, no stage
                write_json(self._path, self._peaks)
        return peak

    def _key(self, stage: Stage, config: ExperimentConfig) -> str:
        keys = config.algos.get(stage.job.algo, {})
        batch = f"{keys.get('batch_size')}/{config.training.micro_batch_size}/{config.generation.batch_size}"
        return f"{stage.job.algo} {stage.kind} {config.models[stage.job.family].ref} {batch}"
