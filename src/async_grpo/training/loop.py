"""One asynchronous run of a user's trainer: everything of the trainer side, put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger
from transformers import TrainerControl, TrainerState, TrainingArguments

from async_grpo.archive import rollout_state
from async_grpo.archive.history import ConsumptionRecord
from async_grpo.archive.rollout_state import RolloutState, SeqSet
from async_grpo.errors import DiskFullError, UnsupportedError, UsageError
from async_grpo.queue import ServerQueue
from async_grpo.records import RolloutGroup
from async_grpo.rundir.paths import RunDir, RunState, write_json
from async_grpo.settings import ArchiveLimit, TrainingSettings
from async_grpo.setup.process import StopRequest
from async_grpo.telemetry.activity import EVALUATING, PUBLISHING, SAVING, TRAINING, activity
from async_grpo.telemetry.run_log import RunLog
from async_grpo.training import correction, partial_batch, trl_trainer
from async_grpo.training.callbacks import LogCallback
from async_grpo.training.distributed import Leader, Ranks, end_with_a_checkpoint, is_sharded
from async_grpo.training.hyperparameters import hyperparameters
from async_grpo.training.partial_batch import BatchInUse
from async_grpo.training.prompts import prompt_rows, refuse_images
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.rollout_source import RolloutSource, StopTraining
from async_grpo.training.schedule import Schedule
from async_grpo.training.weight_publisher import WeightPublication, slots_for
from async_grpo_ipc import Blueprint, WeightExporter

if TYPE_CHECKING:
    from trl import GRPOTrainer


class AsyncTraining:
    """Trains `trainer` on rollouts of worker processes. Use as a context manager, then call `train()` once.

    Raises:
        UnsupportedError: the trainer uses something that cannot run distributed yet.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        *,
        run: RunDir,
        state: RunState,
        settings: TrainingSettings,
        stop: StopRequest,
        ranks: Ranks | None = None,
    ) -> None:
        refuse(trainer, settings)
        self._trainer = trainer
        self._leader = Leader(trainer, ranks)
        correct = self._correction(settings.correction)
        self._run = run
        self._run_id = state.run_id
        self._keep_done = settings.keep_done
        self._deterministic = settings.deterministic
        self._max_staleness = settings.max_staleness
        self._stop = stop
        self.output_dir = Path(trainer.args.output_dir).absolute()
        self.tensorboard = run.tensorboard
        run.update_state(output_dir=str(self.output_dir), correction=settings.correction, seed=settings.seed)

        self.metrics = RolloutMetrics(lambda name, value: trl_trainer.append_metric(trainer, name, value))
        self.log = RunLog(run.metrics)
        self._in_checkpoint = SeqSet()  # groups that a resumed run will not come back to
        self._batch: BatchInUse | None = None  # that the last optimizer step left unfinished
        self._checkpoint, rollouts = self._find_checkpoint() if settings.resume else (None, None)
        if self._checkpoint is not None and rollouts is not None and rollouts.passes_done:
            self._batch = self._load_batch(Path(self._checkpoint))
        self._record = ConsumptionRecord(  # before the queue: it withdraws what this process is to issue again
            run.consumption,
            run_id=state.run_id,
            resumed_from=rollouts.step if rollouts else None,
            max_staleness=settings.max_staleness,
        )
        self._queue = ServerQueue.open(
            run.root,
            state.run_id,
            max_attempts=settings.max_attempts,
            consumed=rollouts.done_set() if rollouts else (),
        )
        sharing = state.workers_sharing if state.num_workers else None
        slots = slots_for(trainer.model, max_staleness=settings.max_staleness, sharing=sharing)
        self._publication = WeightPublication(self._exporter(run, slots))
        self._source = RolloutSource(
            queue=self._queue,
            prompts=lambda start: prompt_rows(trainer, start),
            schedule=schedule_of(trainer, settings.max_staleness),
            run_id=state.run_id,
            seed=trainer.args.seed,
            num_generations=trainer.num_generations,
            metrics=self.metrics,
            published_version=lambda: self._publication.version,
            keep_publishing=self._publication.retry,
            should_stop=self._should_stop,
            in_order=settings.deterministic,
            is_uniform=trl_trainer.uniform_rewards(trainer) if settings.filter_zero_variance else None,
            on_drop=self._record.dropped,
            make_room=lambda: self._trim_archive(ArchiveLimit(0)),
            resume_from=rollouts,
        )
        trl_trainer.make_async(
            trainer,
            take_groups=self._take,
            correct=correct,
            before_checkpoint=self._wait_for_room,
            after_checkpoint=self._save_rollout_state,
        )
        trl_trainer.use_callbacks(trainer, _StepEvents(self), tensorboard=run.tensorboard)
        write_json(run.hyperparameters, hyperparameters(trainer, settings))

    def __enter__(self) -> AsyncTraining:
        return self

    def __exit__(self, *exc: object) -> None:
        self._publication.close()
        self._queue.close()
        self._record.close()
        self.log.close()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self._trainer.state.global_step)

    def train(self) -> bool:
        """Train to the last step; True when it was reached, False when the run was asked to stop before."""
        self._leader.start(self._checkpoint)
        try:
            self._trainer.train(resume_from_checkpoint=self._checkpoint)
        except StopTraining:
            trl_trainer.save_and_end(self._trainer)
        except RuntimeError:  # torch.distributed's own, where a rank died in the midst of a step
            self._leader.blame()
            raise
        return self.step >= int(self._trainer.state.max_steps)

    def _take(self, version: int) -> list[RolloutGroup]:
        try:
            groups = self._source.take(version)
        except StopTraining:
            self._leader.stop()
            raise
        self._leader.hand_out(groups)
        return groups

    def _should_stop(self) -> bool:
        self._leader.check_alive()
        return self.stop_requested()

    def _exporter(self, run: RunDir, slots: int) -> Callable[[], WeightExporter]:
        """Makes the exporter, once the model is where it trains."""
        trainer = self._trainer
        model = trainer.model
        if not is_sharded(trainer):
            return lambda: WeightExporter.from_model(model, run.weights_handle, slots=slots)
        blueprint = Blueprint.of_model(model)
        device = trainer.accelerator.device
        return lambda: WeightExporter.from_blueprint(
            blueprint, self._leader.gather, run.weights_handle, device=device, slots=slots
        )

    def _find_checkpoint(self) -> tuple[str | None, RolloutState | None]:
        found = rollout_state.latest(self.output_dir, self._run_id)
        if found is None:
            logger.info("resuming from the start: the run has no complete checkpoint yet")
            return None, None
        logger.info("resuming from {}", found[0])
        return str(found[0]), found[1]

    def _load_batch(self, checkpoint: Path) -> BatchInUse:
        try:
            partial_batch.check_ranks(checkpoint, self._trainer.args.world_size)
        except UnsupportedError:
            self._leader.start(str(checkpoint))  # so that the others look, too, and do not wait for us
            raise
        return partial_batch.load(checkpoint, self._trainer.accelerator.device)

    def _correction(self, name: str) -> correction.Correction:
        trainer = self._trainer
        if name == "none":
            logger.warning("--correction none: stale rollouts are taken as fresh ones, which can destroy the policy")
        return correction.Correction(
            name,
            trainer.args.loss_type,
            log_pi_old=lambda batch: trl_trainer.log_pi_old(trainer, batch),
            append=lambda metric, value: trl_trainer.append_metric(trainer, metric, value),
        )

    def training_begins(self) -> None:
        step = self.step
        self._show_progress(step)
        activity.doing(PUBLISHING)
        if self._batch is not None:
            trl_trainer.go_on_with(self._trainer, self._batch)
        self._publication.publish(step)
        self._source.advance(step)
        self._leader.go()
        self.metrics.training_begins()
        activity.doing(TRAINING, version=self._publication.version)

    def step_done(self) -> bool:
        """Publish, issue, count; returns whether training goes on."""
        step = self.step
        started = time.monotonic()
        self._show_progress(step)
        activity.doing(PUBLISHING)
        self._batch = trl_trainer.batch_in_use(self._trainer)
        self._record.used(step, self._source.trained())
        if self._deterministic:  # each group is to be generated by exactly one version: the next must not appear before
            waiting = time.monotonic()
            self._source.finish_open(step)
            started += time.monotonic() - waiting
        self._publication.publish(step)
        self._source.advance(step)
        self._count_queue()
        self.metrics.overhead(time.monotonic() - started)
        activity.doing(TRAINING, version=self._publication.version)
        stop = self.stop_requested()
        self._leader.go(stop=stop)
        return not stop

    def _show_progress(self, step: int) -> None:
        activity.progress()
        total = int(self._trainer.state.max_steps)
        activity.trains(step=step, total_steps=total, max_staleness=self._max_staleness)

    def stop_requested(self) -> bool:
        return bool(self._stop)

    def may_stop_evaluation(self) -> bool:
        """Whether to break an evaluation off. Several ranks finish it, as none of them can stop alone."""
        return self._leader.alone and self.stop_requested()

    def _count_queue(self) -> None:
        counts = self._queue.counts()
        self.metrics.workers_alive(len(self._queue.workers()))
        for name, value in (
            ("async/queue_pending", counts.pending),
            ("async/queue_processing", counts.processing),
            ("async/queue_complete", counts.complete),
            ("async/weight_version", self._publication.version or 0),
        ):
            trl_trainer.append_metric(self._trainer, name, value)

    def _wait_for_room(self) -> None:
        activity.doing(SAVING)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        rollout_state.wait_for_room(
            self.output_dir,
            trl_trainer.checkpoint_bytes(self._trainer),
            make_room=lambda: self._trim_archive(ArchiveLimit(0)),
            should_stop=self.stop_requested,
        )
        self._leader.go()

    def _save_rollout_state(self, step: int) -> None:
        self._leader.wait_for_all()  # each rank has written its part
        below, above = rollout_state.pack_consumed(self._source.consumed, self._source.unusable)
        self._record.sync()
        checkpoint = self.output_dir / f"checkpoint-{step}"
        if self._batch is not None:
            partial_batch.save(checkpoint, self._batch)
        rollout_state.save(
            checkpoint,
            RolloutState(
                run_id=self._run_id,
                step=step,
                next_seq=self._source.next_seq,
                rounds=self._source.rounds,
                unusable=self._source.unusable,
                consumed_below=below,
                consumed=above,
                passes_done=self._batch.passes_done if self._batch is not None else 0,
            ),
        )
        with suppress(DiskFullError):  # for people only: a resumed run reads the checkpoint
            self._run.update_state(step=step)
        self._in_checkpoint = self._source.consumed.union(self._source.unusable)
        self._trim_archive(self._keep_done)
        activity.progress()
        activity.doing(TRAINING)

    def _trim_archive(self, limit: ArchiveLimit) -> None:
        """Delete the oldest used groups beyond `limit`; never one that the last checkpoint does not have."""
        removed = self._queue.trim_done(limit.groups(self._run.root / "done"), self._in_checkpoint)
        if removed:
            logger.debug("removed {} of the oldest groups from done/", removed)


def refuse(trainer: GRPOTrainer, settings: TrainingSettings) -> None:
    """Refuse, before anything is started, what cannot be trained so.

    Raises:
        UnsupportedError: the trainer uses something that cannot run distributed, or not with this correction.
        UsageError: two settings exclude each other.
    """
    if settings.deterministic and settings.filter_zero_variance:
        raise UsageError("--filter-zero-variance depends on who is faster, so it cannot be --deterministic.")
    trl_trainer.refuse_unsupported(trainer)
    refuse_images(trainer)
    correction.check(settings.correction, trainer)


def schedule_of(trainer: GRPOTrainer, max_staleness: int) -> Schedule:
    """The arithmetic of this trainer's rounds."""
    return Schedule(
        groups_per_round=trl_trainer.groups_per_round(trainer),
        micro_steps_per_round=trainer.args.steps_per_generation * trainer.num_iterations,
        micro_steps_per_version=trainer.args.gradient_accumulation_steps,
        max_staleness=max_staleness,
    )


class _StepEvents(LogCallback):
    """Passes the trainer's own events on to the run."""

    def __init__(self, training: AsyncTraining) -> None:
        super().__init__(training.log)
        self._training = training

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._training.training_begins()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._training.step_done():
            end_with_a_checkpoint(control)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        activity.progress()  # a micro-batch of a step that accumulates gradients

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        activity.doing(EVALUATING)
        activity.progress()
        if self._training.may_stop_evaluation():  # which may take long
            raise StopTraining

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        activity.doing(TRAINING)
