"""Curves for TensorBoard. A full disk may cost points of them, but never the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from async_grpo.telemetry.run_log import RunLog


class CurvesCallback(TensorBoardCallback):
    """transformers' own callback, with a writer that is replaced when it fails: its thread raises once, and is gone."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open: Callable[[], Any] = partial(SummaryWriter, log_dir=str(folder))
        self._failing = False
        super().__init__(self._open())

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._attempt(super().on_train_begin, *args, **kwargs)

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self._attempt(super().on_log, *args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._attempt(super().on_train_end, *args, **kwargs)

    def _attempt(self, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            if self._failing:
                self.tb_writer = self._open()
            write(*args, **kwargs)
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning("no curves for TensorBoard until they can be written again: {}", error)
            self._failing = True


class LogCallback(TrainerCallback):
    """Step lines on the screen, and `metrics.jsonl`."""

    def __init__(self, log: RunLog) -> None:
        self._log = log

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._log.training_begins(state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._log.logged(state.global_step, logs or {})
