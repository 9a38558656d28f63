"""Curves for TensorBoard. A full disk may cost points of them, but never the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from loguru import logger
from transformers.integrations import TensorBoardCallback


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
