"""The parts of a training, opened in the order in which one needs another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.archive.history import ConsumptionRecord, newest_version, read_record
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.log import logger
from async_grpo.queue import ServerQueue
from async_grpo.rundir import summary
from async_grpo.rundir.files import write_json
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.setup.process import StopRequest
from async_grpo.telemetry.run_log import RunLog
from async_grpo.training import checkpoints, trl_trainer
from async_grpo.training.before_start import engine_of, refuse, say_what_is_trained
from async_grpo.training.checkpoints import CheckpointFolder, UsedGroups
from async_grpo.training.choosing import PromptChooser
from async_grpo.training.companions import Companions
from async_grpo.training.corrections.checks import describe_noise, sampled_with
from async_grpo.training.corrections.fresh_batch import bound_of
from async_grpo.training.corrections.rule import rule_of
from async_grpo.training.corrections.tipping import TippingCallback, load_of, tips_again, what_helps
from async_grpo.training.distributed import Leader, Ranks
from async_grpo.training.groups_for_trl import refuser_of
from async_grpo.training.hyperparameters import hyperparameters
from async_grpo.training.job_issuer import JobIssuer, plain_fields
from async_grpo.training.prompts import prompt_rows
from async_grpo.training.reporting import StatesCallback, report
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.rollout_source import RolloutSource
from async_grpo.training.schedule import schedule_of
from async_grpo.training.trl_trainer import TrainingEvents
from async_grpo.training.watch import Watch
from async_grpo.training.weight_publisher import WeightPublisher, exporter_of

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Parts:
    """What the training loop of a prepared run works with. The caller may hold the server's `lock` already.

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
        lock: KernelLock | None = None,
    ) -> None:
        engine = engine_of(trainer, state)
        generator = engine.name if engine else None
        refuse(trainer, settings, engine)
        say_what_is_trained(trainer, settings)
        self.trainer, self.settings = trainer, settings
        self.run, self.run_id = run, state.run_id
        self.has_nodes = state.plan.launch.ray is not None
        self.leader = Leader(trainer, ranks, stop)
        self.log = RunLog(run.metrics)
        self.metrics = RolloutMetrics(partial(trl_trainer.append_metric, trainer))
        self.resumed = checkpoints.resume(trainer, run, state) if settings.resume else None
        self.folder = CheckpointFolder(trainer, run, state)
        # What this start decides; from here on a resume is not undone.
        found_in = self.resumed.path.parent if self.resumed else self.folder.path
        at = {**self.folder.record, "output_dir": str(found_in)}
        run.update_state(of=self.run_id, **at, generator=generator, undo=None, tips="")
        used = self.resumed.state if self.resumed else None
        if used is not None:
            self.metrics.resumes(step=used.step, rollouts=used.consumed_groups * trainer.num_generations)
        self._sampled = sampled_with(trainer, rule_of(settings).name, generator)
        self._open_queue(used, lock)
        self.archive = UsedGroups(self.queue, run.root / "done", settings.keep_done, used)
        exporter = exporter_of(trainer, run, state, self.leader.gather, engine)
        self.publisher = WeightPublisher(exporter, companions.version_keeper())
        self.evaluations = companions.evaluations(self.queue, self.publisher, used.step if used else 0)
        watch = Watch(trainer, engine=engine, max_staleness=settings.max_staleness)
        self.chooser = self._prompt_chooser(used) if settings.choose_prompts else None
        self.rollouts = self._rollout_source(state, used, watch)

    def _open_queue(self, used: RolloutState | None, lock: KernelLock | None) -> None:
        run, settings = self.run, self.settings
        reached = newest_version(read_record(run.consumption, self.run_id)[0]) if used is not None else 0
        self.history = ConsumptionRecord(  # opened before the queue, which withdraws the jobs to be issued again
            run.consumption,
            run_id=self.run_id,
            resumed_from=used.step if used else None,
            max_staleness=settings.max_staleness,
            sampled=self._sampled,
        )
        self.queue = ServerQueue.open(
            run.root,
            self.run_id,
            max_attempts=settings.max_attempts,
            consumed=used or (),
            lock=lock,
            refuse=refuser_of(self.trainer, reached=reached),
        )

    def _rollout_source(self, state: RunState, used: RolloutState | None, watch: Watch) -> RolloutSource:
        trainer, settings = self.trainer, self.settings
        start = used.consumed_below if used else 0
        issuer = JobIssuer(
            self.queue,
            prompt_rows(trainer, start, chosen=self.chooser.rows(start) if self.chooser else None),
            run_id=state.run_id,
            seed=trainer.args.seed,
            num_generations=trainer.num_generations,
            trainer_state=lambda: plain_fields(trainer.state),
            sampling=watch.sampling,
            archive=self.archive,
            resume_from=used,
        )
        return RolloutSource(
            queue=self.queue,
            issuer=issuer,
            schedule=schedule_of(trainer, settings.max_staleness),
            publisher=self.publisher,
            history=self.history,
            metrics=self.metrics,
            should_stop=self.leader.should_stop,
            in_order=settings.deterministic,
            quotas=getattr(trainer, "task_quotas", None),
            is_uniform=trl_trainer.uniform_rewards(trainer) if settings.filter_zero_variance else None,
            way_to_workers=state.plan.way_to_workers,
            evaluations=self.evaluations,
            learn=self.chooser.learn if self.chooser else None,
            row_counts=self.chooser.counts if self.chooser else list,
            resume_from=used,
            finish_s=state.plan.launch.stop_grace / 2,  # the other half is for the checkpoint
        )

    def _prompt_chooser(self, used: RolloutState | None) -> PromptChooser:
        most_open = schedule_of(self.trainer, self.settings.max_staleness).groups_ahead
        ahead = most_open if self.settings.deterministic else 0
        return PromptChooser(self.trainer, self.run.chosen, ahead=ahead, resume_from=used)

    def give_trainer_to(self, events: TrainingEvents) -> Callable[[], Path]:
        """Let the trainer take its rollouts from `events`, and report; returns what names the folder of the curves."""
        trainer, settings, rule = self.trainer, self.settings, rule_of(self.settings)
        noisy = rule.name == "none" or describe_noise(trainer)
        judged = self.resumed and "undecided_tokens" not in summary.read(self.run.summary)
        stops = not (settings.accept_mismatch or judged or noisy)
        bound = bound_of(trainer, self._sampled, settings.publish_dtype, stops=stops)
        trl_trainer.make_async(trainer, events, correction=rule, fresh=bound, settings=settings)
        curves = self._report()
        write_json(self.run.hyperparameters, hyperparameters(trainer, settings))
        return curves

    def _report(self) -> Callable[[], Path]:
        """Add the callbacks that write what the training does."""
        trainer, run, settings = self.trainer, self.run, self.settings
        trainer.add_callback(StatesCallback(run.trainer_states))
        curves = report(trainer, self.log, make_folder(run.tensorboard, in_private=True))
        rate, most = trainer.args.learning_rate, settings.max_staleness
        helps = what_helps(rule_of(settings), most, trainer.importance_sampling_level, rate)
        keep = partial(run.update_state, of=self.run_id, tipped_at=load_of(rate, most))
        if said := tips_again(load_of(rate, most), run.state_of(self.run_id).tipped_at):
            logger.warning("{}", said)
        trainer.add_callback(TippingCallback(partial(trl_trainer.latest_metrics, trainer), helps, keep))
        return curves

    def close(self) -> None:
        """Close what was opened, the newest first. Workers see that the weights are withdrawn."""
        for part in (self.evaluations, self.publisher, self.queue, self.history, self.log, self.chooser):
            if part is not None:
                part.close()
