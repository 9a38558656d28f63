"""The seconds of what not every step has, under verl's names: writing a checkpoint, and an evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl import GRPOTrainer
else:  # the class that it is put before takes this place at run time
    GRPOTrainer = object


class RarelyTimed(GRPOTrainer):
    """Put before `GRPOTrainer`: logs `timing_s/save_checkpoint` and `timing_s/testing` with the step after."""

    _is_timed = False  # whether an outer one of these is under way, which counts

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.timed_rarely("save_checkpoint"):
            super()._save_checkpoint(model, trial)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self.timed_rarely("testing"):
            return super().evaluate(*args, **kwargs)

    def note_seconds(self, name: str, seconds: float) -> None:
        """Log what was measured elsewhere; workers evaluate without this trainer."""
        self._metrics["train"][f"timing_s/{name}"].append(seconds)

    @contextmanager
    def timed_rarely(self, name: str) -> Iterator[None]:
        """Log the seconds of this block. Of blocks within each other only the outermost is logged."""
        if self._is_timed:
            yield
            return
        started, self._is_timed = time.perf_counter(), True
        try:
            yield
        finally:
            self._is_timed = False
        self.note_seconds(name, time.perf_counter() - started)
