"""A callback for setup files that ends a run when its evaluations no longer improve (`early_stopping`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from async_grpo.evals.early_stopping import ImprovementWatch
from async_grpo.log import logger


class StopEarly(TrainerCallback):
    """Ends the training, with a checkpoint, after `patience` evaluations in a row without improvement.

    The workers evaluate while the training goes on, so a run may end some steps after the evaluation that decides.

    Args:
        file: `evaluations.jsonl` of the run.
        patience, threshold: as of `ImprovementWatch`.
    """

    def __init__(self, file: Path, patience: int, threshold: float) -> None:
        self._watch = ImprovementWatch(file, patience, threshold)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reasons = [self._watch.reason_to_stop() if state.is_world_process_zero else ""]
        if args.world_size > 1:  # all processes end at the same step
            broadcast_object_list(reasons)
        if reasons[0]:
            logger.info("stopped early: {}", reasons[0])
            control.should_training_stop = control.should_save = True
