"""Passes what the trainer logs on to the run's own records."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from async_grpo.metrics import RunLog


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
