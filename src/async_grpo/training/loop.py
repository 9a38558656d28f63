"""The training loop: what happens around the optimizer steps of TRL's trainer, in the order in which it happens.

    training_begins         publish the first version, issue the first jobs
    for each optimizer step
        take_groups         wait for the finished groups of one generation batch
                            TRL assembles the batch, `correction` weighs it, TRL computes the loss and takes the step
        step_done           count the groups as used, publish the new version, issue new jobs, evaluate where due
        before_checkpoint   wait for room on the disk       | after the steps
        checkpoint_written  add which groups are used       | that `save_steps` names

TRL's trainer calls these methods of `AsyncTraining` by way of `trl_trainer`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from loguru import logger

from async_grpo.algorithm import compares_groups
from async_grpo.archive import checkpoint_folders, room
from async_grpo.archive.history import ConsumptionRecord, Sampler, newest_version, read_record
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import DiskFullError, UsageError
from async_grpo.queue import ServerQueue
from async_grpo.records import RolloutGroup
from async_grpo.rundir.files import write_json
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.rundir.run_options import OF_THE_LOSS
from async_grpo.settings import TrainingSettings
from async_grpo.setup.generator_choice import choose_generator
from async_grpo.setup.needs import check_needs
from async_grpo.setup.openai_harness import check_agent
from async_grpo.setup.overrides import check_callbacks, check_fields, check_overrides, describe_overrides
from async_grpo.setup.own_generation import check_generation
from async_grpo.setup.process import StopRequest
from async_grpo.setup.replaced import replaced_by_user
from async_grpo.setup.sampling import check_sampling
from async_grpo.telemetry.activity import PUBLISHING, SAVING, TRAINING, activity
from async_grpo.telemetry.run_log import RunLog
from async_grpo.training import checkpoints, trl_trainer
from async_grpo.training.checkpoints import CheckpointFolder, Resumed, UsedGroups
from async_grpo.training.companions import Companions
from async_grpo.training.corrections.checks import check, describe, describe_noise, sampled_with
from async_grpo.training.corrections.fresh_batch import bound_of
from async_grpo.training.corrections.rule import Rule, rule_of
from async_grpo.training.corrections.tipping import TippingCallback, what_helps
from async_grpo.training.corrections.trl_loss import has_own_loss
from async_grpo.training.distributed import Leader, Ranks, exporter_of
from async_grpo.training.groups import refuser_of
from async_grpo.training.hyperparameters import hyperparameters
from async_grpo.training.job_issuer import JobIssuer, state_for_rewards
from async_grpo.training.prompts import prompt_rows
from async_grpo.training.reporting import StatesCallback, report
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.rollout_source import RolloutSource, StopTraining
from async_grpo.training.schedule import Schedule
from async_grpo.training.sharding import refuse_publish_dtype, sharding_of
from async_grpo.training.trl_trainer import TrainingEvents
from async_grpo.training.watch import Watch
from async_grpo.training.weight_publisher import WeightPublisher

if TYPE_CHECKING:
    from trl import GRPOTrainer


class AsyncTraining(TrainingEvents):
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
        companions: Companions,
        ranks: Ranks | None = None,
        lock: KernelLock | None = None,  # the server's, where the caller holds it already
    ) -> None:
        generator = _generator(trainer, state)
        refuse(trainer, settings, generator)
        if own := describe_overrides(trainer):
            logger.info("methods of TRL that the setup file replaces: {}", own)
        _say_what_the_loss_is(trainer, rule_of(settings), settings)
        self._trainer, self._settings = trainer, settings
        self._run, self._run_id = run, state.run_id
        self.has_trained = True  # False: the checkpoint was at the last step already
        self._leader = Leader(trainer, ranks, stop)
        self.log = RunLog(run.metrics)
        self.metrics = RolloutMetrics(partial(trl_trainer.append_metric, trainer))
        self._resumed: Resumed | None = None
        if settings.resume:
            self._resumed = checkpoints.resume(trainer, run, state)
        self._folder = CheckpointFolder(trainer, run, state)
        self._accept()
        used = self._resumed.state if self._resumed else None
        if used is not None:
            self.metrics.resumes(step=used.step, rollouts=used.consumed_groups * trainer.num_generations)
        sampled = sampled_with(trainer, rule_of(settings).name, generator)
        self._open_queue(sampled, used, lock)
        self._archive = UsedGroups(self._queue, run.root / "done", settings.keep_done, used)
        exporter = exporter_of(trainer, self._leader, run, state, settings)
        self._publisher = WeightPublisher(exporter, companions.version_keeper())
        self._evaluations = companions.evaluations(self._queue, self._publisher, used.step if used else 0)
        watch = Watch(trainer, generator=generator, max_staleness=settings.max_staleness)
        self._rollouts = self._rollout_source(state, used, watch)
        self._take_the_trainer(sampled)
        self.curves = self._report()
        write_json(run.hyperparameters, hyperparameters(trainer, settings))

    def _open_queue(self, sampled: Sampler, used: RolloutState | None, lock: KernelLock | None) -> None:
        run, settings = self._run, self._settings
        reached = newest_version(read_record(run.consumption, self._run_id)[0]) if used is not None else 0
        self._history = ConsumptionRecord(  # opened before the queue, which withdraws the jobs to be issued again
            run.consumption,
            run_id=self._run_id,
            resumed_from=used.step if used else None,
            max_staleness=settings.max_staleness,
            sampled=sampled,
        )
        self._queue = ServerQueue.open(
            run.root,
            self._run_id,
            max_attempts=settings.max_attempts,
            consumed=used or (),
            lock=lock,
            refuse=refuser_of(self._trainer, reached=reached),
        )

    def _take_the_trainer(self, sampled: Sampler) -> None:
        trainer, settings, rule = self._trainer, self._settings, rule_of(self._settings)
        noisy = rule.name == "none" or describe_noise(trainer)
        stops = not (settings.accept_mismatch or self._resumed or noisy)
        bound = bound_of(trainer, sampled, settings.publish_dtype, stops=stops)
        trl_trainer.make_async(trainer, self, correction=rule, fresh=bound)

    def _report(self) -> Callable[[], Path]:
        """Add the callbacks that write what the training does; returns what names the folder of the curves."""
        trainer, run, settings = self._trainer, self._run, self._settings
        trainer.add_callback(StatesCallback(run.trainer_states))
        curves = report(trainer, self.log, make_folder(run.tensorboard, in_private=True))
        helps = what_helps(rule_of(settings), settings.max_staleness, trainer.importance_sampling_level)
        keep = partial(run.update_state, of=self._run_id)
        trainer.add_callback(TippingCallback(partial(trl_trainer.latest_metrics, trainer), helps, keep))
        return curves

    def _accept(self) -> None:
        """Write into `run.json` what this start decides; from here on a resume is not undone."""
        found_in = self._resumed.path.parent if self._resumed else self._folder.path
        at = {**self._folder.record, "output_dir": str(found_in)}
        loss = {name: getattr(self._settings, name) for name in OF_THE_LOSS}
        self._run.update_state(of=self._run_id, seed=self._settings.seed, **loss, **at, undo={}, tips="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._evaluations.close()
        self._publisher.close()
        self._queue.close()
        self._history.close()
        self.log.close()

    @property
    def output_dir(self) -> Path:
        return self._folder.path

    @property
    def step(self) -> int:
        """Optimizer steps done; also the policy version that training has reached."""
        return int(self._trainer.state.global_step)

    @property
    def total_steps(self) -> int:
        return int(self._trainer.state.max_steps)

    def train(self) -> bool:
        """Train to the last step; True when it was reached, False when the run was asked to stop before."""
        checkpoint = self._resumed.path if self._resumed else None
        self._leader.start(checkpoint, self._folder)
        try:
            self.has_trained = trl_trainer.fit(self._trainer, resume_from=checkpoint)  # calls the methods below
        except RuntimeError:  # torch.distributed's own, where a rank died in the middle of a step
            self._leader.blame()
            raise
        if self.has_trained:
            self._folder.keep_only_the_best()
        if at_the_end := self.step >= self.total_steps:
            self._evaluations.say_missing(self.step)
        return at_the_end

    def training_begins(self) -> None:
        if self._resumed is not None and self._resumed.batch is not None:
            trl_trainer.go_on_with(self._trainer, self._resumed.batch)
        self._rollouts.ends_at = self.total_steps
        self._note_what_the_options_came_to()
        self._show_progress()
        self._publish_and_issue()
        self._leader.go()
        self.metrics.training_begins()

    def _note_what_the_options_came_to(self) -> None:
        state = self._run.state_of(self._run_id)
        came_to = {"steps": self.total_steps, "seed": self._trainer.args.seed}
        came_to |= {"generator": _generator(self._trainer, state)}
        with suppress(DiskFullError):  # for people, and for a replay
            self._run.update_state(of=self._run_id, resolved={**state.resolved, **came_to})

    def take_groups(self, version: int) -> list[RolloutGroup]:
        groups = self._rollouts.take(version)
        self._leader.hand_out(groups)
        return groups

    def step_done(self) -> bool:
        self._show_progress()
        self._history.used(self.step, self._rollouts.trained())
        # Deterministic: one version generates each group, so the next may not be visible before they are finished.
        stop = self._settings.deterministic and not self._all_is_finished()
        if not stop:
            with self.metrics.server_is_busy():
                self._publish_and_issue()
                self._count_queue()
            stop = self._leader.should_stop() or (self.step >= self.total_steps and not self._evaluate_at_the_end())
        self._leader.go(stop=stop)
        return not stop

    def evaluation_goes_on(self) -> None:
        if self._leader.alone and self._leader.should_stop():  # several ranks can only end an evaluation together
            raise StopTraining

    def write_the_rest(self, and_then: Callable[[], None], should_stop: Callable[[], bool]) -> None:
        """Write every line that found no room yet, and what `and_then` writes; wait for room.

        Raises:
            DiskFullError: the run is to stop, and there is still no room.
        """

        def write() -> None:
            for lines in (self._history, self.log, self._evaluations):
                lines.sync()
            and_then()

        room.write_with_room(write, make_room=self._archive.make_room, should_stop=should_stop)

    def ends_early(self) -> None:
        self._leader.stop()

    def before_checkpoint(self) -> Path:
        activity.doing(SAVING)
        checkpoint_folders.start_saving(self._folder.staging)
        needed, folder = checkpoints.bytes_needed(self._trainer), self._folder.staging
        make_room, should_stop = self._archive.make_room, self._leader.should_stop
        room.wait_for_room(folder, needed, make_room=make_room, should_stop=should_stop)
        room.write_with_room(self._history.sync, make_room=make_room, should_stop=should_stop)
        self._leader.go()
        return self._folder.staging

    def checkpoint_written(self, checkpoint: Path) -> None:
        self._leader.wait_for_all()  # each rank has written its part
        self._history.sync()
        batch = self._trainer.batch_after_step
        state = self._rollouts.state_at(self.step, passes_done=batch.passes_done if batch is not None else 0)
        self._folder.put(checkpoint, state, batch)
        self._leader.wait_for_all()  # no rank goes on before the checkpoint has its place
        self._archive.checkpointed(state)
        self._folder.rotate()
        activity.progress()
        activity.doing(TRAINING)

    def _show_progress(self) -> None:
        activity.progress()
        activity.trains(step=self.step, total_steps=self.total_steps, max_staleness=self._settings.max_staleness)

    def _publish_and_issue(self) -> None:
        activity.doing(PUBLISHING)
        self._publisher.publish(self.step)
        self._evaluations.published(self.step)
        if self._settings.max_staleness > 0:  # else when the batch is asked for: callbacks may change it until then
            self._rollouts.advance(self.step)
        activity.doing(TRAINING, version=self._publisher.version)

    def _all_is_finished(self) -> bool:
        return self._rollouts.finish_open(self.step) and self._rollouts.finish_evaluation(self.step)

    def _evaluate_at_the_end(self) -> bool:
        """Evaluate the last version, after the evaluation that is under way; False if asked to stop meanwhile."""
        if not self._rollouts.finish_evaluation(self.step):
            return False
        self._publisher.retry()
        self._evaluations.published(self.step, last=True)
        return self._rollouts.finish_evaluation(self.step)

    def _count_queue(self) -> None:
        counts = self._queue.counts()
        self.metrics.workers_alive(len(self._queue.workers()))
        for name, value in (
            ("async/queue_pending", counts.pending),
            ("async/queue_processing", counts.processing),
            ("async/queue_complete", counts.complete),
            ("async/weight_version", self._publisher.version or 0),
        ):
            trl_trainer.append_metric(self._trainer, name, value)

    def _rollout_source(self, state: RunState, used: RolloutState | None, watch: Watch) -> RolloutSource:
        trainer, settings = self._trainer, self._settings
        issuer = JobIssuer(
            self._queue,
            prompt_rows(trainer, start=used.consumed_below if used else 0),
            run_id=state.run_id,
            seed=trainer.args.seed,
            num_generations=trainer.num_generations,
            trainer_state=partial(state_for_rewards, trainer),
            sampling=watch.sampling,
            archive=self._archive,
            resume_from=used,
        )
        return RolloutSource(
            queue=self._queue,
            issuer=issuer,
            schedule=schedule_of(trainer, settings.max_staleness),
            publisher=self._publisher,
            history=self._history,
            metrics=self.metrics,
            should_stop=self._leader.should_stop,
            in_order=settings.deterministic,
            quotas=getattr(trainer, "task_quotas", None),
            is_uniform=trl_trainer.uniform_rewards(trainer) if settings.filter_zero_variance else None,
            evaluations=self._evaluations,
            resume_from=used,
            finish_s=state.stop_grace_s / 2,  # the other half is for the checkpoint
        )


def refuse(trainer: GRPOTrainer, settings: TrainingSettings, generator: str | None) -> None:
    """Refuse, before anything is started, what cannot be trained this way.

    Args:
        generator: what the workers sample with; None where that is not known here.

    Raises:
        UnsupportedError: the trainer uses something that cannot run distributed, or not with this correction.
        UsageError: two settings exclude each other.
    """
    if settings.deterministic and settings.filter_zero_variance:
        raise UsageError("--filter-zero-variance depends on which worker is faster, so it excludes --deterministic.")
    if settings.filter_zero_variance and not compares_groups(trainer):
        raise UsageError(
            f"--filter-zero-variance replaces groups that teach nothing, and {type(trainer).__name__} learns from "
            "equal rewards too. Leave it out."
        )
    settings.check()
    refuse_publish_dtype(settings.publish_dtype, sharded=sharding_of(trainer) is not None)
    trl_trainer.refuse_unsupported(trainer)
    check_agent(trainer)
    if generator is not None:  # workers that are started by hand may have another environment
        check_needs(trainer)
    check_fields(trainer)
    check_overrides(trainer)
    check_callbacks(trainer)
    check(rule_of(settings), trainer, own_loss=has_own_loss(trainer))
    if generator is not None:  # else the workers check it
        check_generation(trainer, generator)
    check_sampling(trainer, settings.correction, generator, settings.eval_sampling() if settings.eval_every else None)


def _generator(trainer: GRPOTrainer, state: RunState) -> str | None:
    """What the launcher's workers sample with; None for workers that are started by hand."""
    on_gpu = trainer.accelerator.device.type != "cpu"
    return choose_generator(state.generator, trainer, on_gpu=on_gpu) if state.num_workers else None


def _say_what_the_loss_is(trainer: GRPOTrainer, rule: Rule, settings: TrainingSettings) -> None:
    if rule.name == "none":
        logger.warning("--correction none: stale rollouts are taken as fresh ones, which can destroy the policy")
    told = describe(rule, trainer, max_staleness=settings.max_staleness, own_loss=has_own_loss(trainer))
    if told:
        logger.info("{}", told)
    if settings.filter_zero_variance and "_generate_and_score_completions" in replaced_by_user(trainer):
        logger.warning(
            "--filter-zero-variance looks at rewards only, not at what _generate_and_score_completions of {} does.",
            type(trainer).__name__,
        )
    if rule.name != "none" and (told := describe_noise(trainer)):
        logger.warning("{}", told)
    if later := schedule_of(trainer, settings.max_staleness).versions_within_round:
        logger.info(
            "A rollout is at most {} versions old when its batch is begun, and at most {} in the last optimizer step "
            "on that batch.",
            settings.max_staleness,
            settings.max_staleness + later,
        )


def schedule_of(trainer: GRPOTrainer, max_staleness: int) -> Schedule:
    """The arithmetic of this trainer's rounds."""
    return Schedule(
        groups_per_round=trl_trainer.groups_per_round(trainer),
        micro_steps_per_round=trainer.args.steps_per_generation * trainer.num_iterations,
        micro_steps_per_version=trainer.args.gradient_accumulation_steps,
        max_staleness=max_staleness,
    )
