"""The training loop: what happens around the optimizer steps of TRL's trainer, in the order in which it happens.

    training_begins         publish the first version, issue the first jobs
    for each optimizer step
        take_groups         wait for the finished groups of one generation batch
                            TRL assembles the batch, `correction` weighs it, TRL computes the loss and takes the step
        step_done           count the groups as used, publish the new version, issue new jobs, evaluate where due
        before_checkpoint   wait for space on the disk      | after the steps
        checkpoint_written  add which groups are used       | that `save_steps` names

TRL's trainer calls these methods of `AsyncTraining` by way of `trl_trainer`. `assembly` makes its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

from async_grpo.archive import checkpoint_folders, disk_space
from async_grpo.records import RolloutGroup
from async_grpo.telemetry.activity import PUBLISHING, SAVING, TRAINING, activity
from async_grpo.training import checkpoints, trl_trainer
from async_grpo.training.assembly import Parts
from async_grpo.training.reporting import append_nodes, append_queue
from async_grpo.training.rollout_source import StopTraining
from async_grpo.training.trl_trainer import TrainingEvents


class AsyncTraining(TrainingEvents):
    """Trains on rollouts of worker processes. Use as a context manager, then call `train()` once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._trainer, self._settings = parts.trainer, parts.settings
        self._leader, self._resumed, self._folder = parts.leader, parts.resumed, parts.folder
        self._history, self._archive, self._rollouts = parts.history, parts.archive, parts.rollouts
        self._publisher, self._evaluations = parts.publisher, parts.evaluations
        self.log, self.metrics = parts.log, parts.metrics
        self.has_trained = True  # False: the checkpoint was at the last step already
        self.curves = parts.give_trainer_to(self)  # names the folder of the curves

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._parts.close()

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

    @property
    def figures(self) -> dict[str, float]:
        """What the steps have shown of padding, and of fresh tokens that are too few; empty before the first."""
        there = self._trainer.tokens_there
        padding = {"padding_fraction": round(self._trainer.tokens_computed / there, 3)} if there else {}
        return {**padding, **self._trainer.correct.fresh.undecided}

    def train(self) -> bool:
        """Train to the last step; True when it was reached, False when the run was asked to stop before."""
        checkpoint = self._resumed.path if self._resumed else None
        self._leader.start(checkpoint, self._folder)
        try:
            self.has_trained = trl_trainer.fit(self._trainer, resume_from=checkpoint)  # calls the methods below
        except RuntimeError as error:  # torch.distributed's own, where a rank died in the middle of a step
            self._leader.blame(error)
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
        self._show_progress()
        self._publish_and_issue()
        self._leader.go()
        self.metrics.training_begins()

    def take_groups(self, version: int) -> list[RolloutGroup]:
        groups = self._rollouts.take(version)
        self._leader.hand_out(groups)
        return groups

    def step_done(self) -> bool:
        self._show_progress()
        self._history.used(self.step, self._rollouts.trained())
        # Deterministic: one version generates each group, so the next may not be visible before they are finished.
        finishes = self._settings.deterministic
        stop = finishes and not (self._rollouts.finish_open(self.step) and self._rollouts.finish_evaluation(self.step))
        if not stop:
            with self.metrics.server_is_busy():
                self._publish_and_issue()
                append_queue(self._trainer, self._parts.queue, self.metrics, self._publisher.version)
                if self._parts.has_nodes:
                    append_nodes(self._trainer, self._parts.run.nodes)
            stop = self._leader.should_stop() or (self.step >= self.total_steps and not self._evaluate_at_the_end())
        self._leader.go(stop=stop)
        return not stop

    def evaluation_goes_on(self) -> None:
        if self._leader.alone and self._leader.should_stop():  # several ranks can only end an evaluation together
            raise StopTraining

    def write_the_rest(self, and_then: Callable[[], None], should_stop: Callable[[], bool]) -> None:
        """Write every line that found no space yet, and what `and_then` writes; wait for space.

        Raises:
            DiskFullError: the run is to stop, and there is still no space.
        """

        def write() -> None:
            for lines in (self._history, self.log, self._evaluations):
                lines.sync()
            and_then()

        disk_space.retry_while_full(write, make_space=self._archive.make_space, should_stop=should_stop)

    def ends_early(self) -> None:
        self._leader.stop()

    def before_checkpoint(self) -> Path:
        activity.doing(SAVING)
        checkpoint_folders.start_saving(self._folder.staging)
        needed, folder = checkpoints.bytes_needed(self._trainer), self._folder.staging
        make_space, should_stop = self._archive.make_space, self._leader.should_stop
        disk_space.wait_for_space(folder, needed, make_space=partial(make_space, folder), should_stop=should_stop)
        disk_space.retry_while_full(self._sync_records, make_space=make_space, should_stop=should_stop)
        self._leader.go()
        return self._folder.staging

    def checkpoint_written(self, checkpoint: Path) -> None:
        self._leader.wait_for_all()  # each rank has written its part
        self._sync_records()
        batch = self._trainer.batch_after_step
        state = self._rollouts.state_at(self.step, passes_done=batch.passes_done if batch is not None else 0)
        self._folder.put(checkpoint, state, batch)
        self._leader.wait_for_all()  # no rank goes on before the checkpoint has its name
        self._archive.checkpointed(state)
        self._folder.rotate()
        activity.progress()
        activity.doing(TRAINING)

    def _sync_records(self) -> None:
        self._history.sync()
        if self._parts.chooser is not None:
            self._parts.chooser.sync()

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

    def _evaluate_at_the_end(self) -> bool:
        """Evaluate the last version, after the evaluation that is under way; False if asked to stop meanwhile."""
        if not self._rollouts.finish_evaluation(self.step):
            return False
        self._publisher.retry()
        self._evaluations.published(self.step, last=True)
        return self._rollouts.finish_evaluation(self.step)
