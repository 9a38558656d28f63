"""What a training reports: step lines, `metrics.jsonl` and TensorBoard's curves.

A full disk may cost points of a curve, but never the run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback

from async_grpo.log import logger
from async_grpo.queue import ServerQueue
from async_grpo.redaction import Redactor
from async_grpo.telemetry.nodes_file import read_nodes
from async_grpo.telemetry.run_log import RunLog
from async_grpo.telemetry.trainer_states import StateWriter
from async_grpo.training.job_issuer import plain_fields
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.trl_trainer import append_metric, latest_metrics

if TYPE_CHECKING:
    from trl import GRPOTrainer


def report(trainer: GRPOTrainer, log: RunLog, tensorboard: Path) -> Callable[[], Path]:
    """Write what `trainer` logs to `log`, and to `tensorboard` unless the setup file has a folder for TensorBoard.

    Returns a function that names the folder of the curves, once the training has begun.
    """
    callbacks = trainer.callback_handler.callbacks
    given = next((callback for callback in callbacks if isinstance(callback, TensorBoardCallback)), None)
    if given is None:
        trainer.add_callback(CurvesCallback(tensorboard))
    sampled_with = f"temperature {trainer.args.temperature:g}, top_p {trainer.args.top_p:g}"
    callbacks.insert(0, LogCallback(log, partial(latest_metrics, trainer), sampled_with))
    return partial(_folder_of, given, given and given.tb_writer, tensorboard)


def _folder_of(given: Any, writer: Any, ours: Path) -> Path:
    """Where a callback of the setup file writes, with the writer that it was made with if it was; None: where we do."""
    return Path(getattr(writer, "log_dir", None) or getattr(given, "logging_dir", None) or ours).absolute()


def append_queue(trainer: GRPOTrainer, queue: ServerQueue, metrics: RolloutMetrics, version: int | None) -> None:
    """Add the state of the queue to the training metrics, and the newest version that workers can see."""
    counts = queue.counts()
    metrics.workers = sum(worker.workers for worker in queue.workers())
    append_metric(trainer, "async/queue_pending", counts.pending)
    append_metric(trainer, "async/queue_processing", counts.processing)
    append_metric(trainer, "async/queue_complete", counts.complete)
    append_metric(trainer, "async/weight_version", version or 0)


def append_nodes(trainer: GRPOTrainer, file: Path) -> None:
    """Add what other machines cost to the training metrics, where the run has some."""
    if (record := read_nodes(file)) is not None:
        for name, value in record.metrics().items():
            append_metric(trainer, name, value)


class LogCallback(TrainerCallback):
    """Step lines on the screen, one for each optimizer step, and `metrics.jsonl`, as often as the trainer logs.

    Args:
        latest: the figures of the last step, for the steps that the trainer does not log (`logging_steps`).
    """

    def __init__(self, log: RunLog, latest: Callable[[], dict[str, float]], sampled_with: str = "") -> None:
        self._log, self._latest, self._sampled_with = log, latest, sampled_with

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._log.training_begins(state.max_steps, state.global_step)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._log.step_done(state.global_step, self._latest())  # the trainer logs a step after `on_step_end`

    on_train_end = on_step_begin

    def on_log(self, args: Any, state: TrainerState, control: Any, *, logs: dict[str, Any], **kwargs: Any) -> None:
        self._log.logged(state.global_step, logs, self._sampled_with)


class StatesCallback(TrainerCallback):
    """Writes the state of each step for the reward functions in workers. To be called last: others may change it."""

    def __init__(self, path: Path) -> None:
        self._writer = StateWriter(path)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._writer.begins(state.global_step)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._writer.step(state.global_step, plain_fields(state), state.log_history)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._writer.close()


class CurvesCallback(TensorBoardCallback):
    """transformers' own callback, with a new writer after a failure: the thread of the old one has ended.

    A resumed run trains steps again: TensorBoard forgets what an earlier process has written of them.
    """

    def __init__(self, folder: Path) -> None:
        self._open: Callable[[], Any] = partial(_event_writer, folder)
        self._failing = False
        super().__init__(self._open())

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._attempt(self._forget_later_than, state.global_step)
        self._attempt(super().on_train_begin, args, state, control, **kwargs)

    def _forget_later_than(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        restarted = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self.tb_writer.file_writer.add_event(restarted)

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


_redact = Redactor()


def _event_writer(folder: Path) -> Any:
    """A writer of event files without secrets: transformers gives it all settings of trainer and model as text."""
    from torch.utils.tensorboard import SummaryWriter

    class Writer(SummaryWriter):
        def add_text(self, tag: str, text_string: str, *args: Any, **kwargs: Any) -> None:
            super().add_text(tag, _redact(text_string), *args, **kwargs)

    return Writer(log_dir=str(folder))
