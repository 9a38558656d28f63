"""A whole asynchronous run in one process: no queue, no shared memory, only TRL and our hooks into it.

The trainer's rollouts come from a second copy of the user's trainer, made a rollout trainer, and pass through the
bytes of a job file on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from async_grpo.engines import Engine
from async_grpo.queue.codec import decode_group, encode_group
from async_grpo.records import Job, RolloutGroup, Timings
from async_grpo.rollout.engine_choice import transformers_engine
from async_grpo.rollout.generation import Generation, generation
from async_grpo.rollout.trl_group import GeneratedGroup, GroupOutcome, to_record
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.settings import NO_PADDING, TrainingSettings
from async_grpo.setup.generator_choice import HF
from async_grpo.setup.worker_build import built_for_a_worker
from async_grpo.telemetry.trainer_states import StateReader
from async_grpo.training.corrections.fresh_batch import Bound
from async_grpo.training.corrections.rule import Rule, rule
from async_grpo.training.job_issuer import plain_fields
from async_grpo.training.prompts import prompt_rows
from async_grpo.training.reporting import StatesCallback
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.schedule import groups_per_round
from async_grpo.training.trl_trainer import TrainingEvents, append_metric, make_async
from async_grpo.training.watch import Watch
from kit.groups import make_job
from kit.tiny_trainer import GROUP_SIZE
from kit.waiting import DEADLINE_S

LAST_ENTRY = "train_runtime"  # a key of the last entry of a trainer's log history only


class InProcessWorker:
    """What a worker generates and scores with, without its queue and its weights.

    Args:
        engine: samples in place of the trainer's own model.
        states: what a server writes of each step.
    """

    def __init__(self, trainer: GRPOTrainer, engine: Engine | None = None, states: StateReader | None = None) -> None:
        self.trl = RolloutTrainer(trainer, states)
        self.calls: Generation = generation(self.trl, engine or transformers_engine(self.trl))

    def ended(self, wanted: int, jobs: Sequence[Job] = (), version: int = 0) -> list[GroupOutcome]:
        """Start the jobs, and step until so many groups have ended, in the order of their jobs."""
        deadline = time.monotonic() + DEADLINE_S
        self.calls.start(jobs, version)
        ended = self.calls.step()
        while len(ended) < wanted:
            assert time.monotonic() < deadline, "the engine does not come to an end"
            ended += self.calls.step()
        return sorted(ended, key=lambda outcome: outcome.job.seq)

    def generate(self, jobs: Sequence[Job], version: int = 0) -> list[GeneratedGroup]:
        """The groups of the jobs, not scored yet."""
        groups = []
        for outcome in self.ended(len(jobs), jobs, version):
            if outcome.error is not None:
                raise outcome.error
            assert outcome.group is not None
            groups.append(outcome.group)
        return groups

    def rollouts(self, jobs: Sequence[Job], version: int = 0) -> list[RolloutGroup]:
        return [
            to_record(group, self.trl.score([group])[0], attempt=0, worker="dev0", timings=Timings())
            for group in self.generate(jobs, version)
        ]


def jobs_of(rows: Iterable[dict[str, Any]], group_size: int = GROUP_SIZE) -> list[Job]:
    """A job for each row, numbered and seeded from 0."""
    return [make_job(seq, group_size, row=dict(row)) for seq, row in enumerate(rows)]


class InProcessRun(TrainingEvents):
    """A trainer that takes its rollouts from workers, and one worker that works whenever it is asked to.

    Args:
        get_trainer: the user's.
        fresh_every: the worker adopts the newest weights once in this many batches; 1 is the synchronous schedule.
        engine: samples in place of the worker's model.
        correction: what is done about stale groups.
        fresh: how far trainer and sampler may be apart on fresh groups; None: nobody looks.
        padding: `none` of it is computed, or it is as in `trl`.
    """

    def __init__(
        self,
        get_trainer: Callable[[], GRPOTrainer],
        *,
        fresh_every: int = 1,
        engine: Engine | None = None,
        correction: str | Rule = "bypass",
        fresh: Bound | None = None,
        padding: str = NO_PADDING,
    ) -> None:
        self.trainer = get_trainer()
        with built_for_a_worker(1):
            self.worker: Any = get_trainer()
        states = Path(self.trainer.args.output_dir) / "trainer_states.jsonl"
        self.trainer.add_callback(StatesCallback(states))
        self._working = InProcessWorker(self.worker, engine, StateReader(states))
        self._fresh_every = fresh_every
        self._metrics = RolloutMetrics(partial(append_metric, self.trainer))
        self._rows = prompt_rows(self.trainer)
        self._watch = Watch(self.trainer, engine=HF, max_staleness=0)
        self._version = 0
        self._seq = 0
        self.batches: list[list[RolloutGroup]] = []  # what the trainer took, batch by batch
        self.inputs: list[dict[str, Any]] = []  # what the loss consumes, batch by batch
        self.versions: list[int] = []  # the trainer's, when it took the batch
        self.checkpoints: list[str] = []
        correction = correction if isinstance(correction, Rule) else rule(correction)
        make_async(self.trainer, self, correction=correction, fresh=fresh, settings=TrainingSettings(padding=padding))
        self.trainer.correct = ShownCorrection(self.trainer.correct, self._corrected)

    def train(self) -> InProcessRun:
        self.trainer.train()
        return self

    @property
    def logs(self) -> list[dict[str, Any]]:
        """One entry a training step."""
        return training_logs(self.trainer)

    @property
    def groups(self) -> list[RolloutGroup]:
        return [group for batch in self.batches for group in batch]

    def checkpoint_written(self, checkpoint: Path) -> None:
        self.checkpoints.append(checkpoint.name)

    def take_groups(self, version: int) -> Sequence[RolloutGroup]:
        if len(self.batches) % self._fresh_every == 0:
            self.worker.model.load_state_dict(self.trainer.model.state_dict())
            self._version = version
        with torch.random.fork_rng(devices=[]):  # a worker's randomness is not the trainer's
            torch.manual_seed(len(self.batches))
            groups = self._generate()
        self.batches.append(groups)
        self.versions.append(version)
        self._metrics.waited(0.0)
        self._metrics.batch_taken(groups, version)
        return groups

    def _generate(self) -> list[RolloutGroup]:
        jobs = [self._next_job() for _ in range(groups_per_round(self.trainer))]
        return [decode_group(encode_group(group)) for group in self._working.rollouts(jobs, self._version)]

    def _next_job(self) -> Job:
        self._seq += 1
        return make_job(
            self._seq - 1,
            self.trainer.num_generations,
            row=next(self._rows),
            seed=self._seq,
            born_version=self._version,
            sampling=self._watch.sampling(),
            trainer_state=plain_fields(self.trainer.state),
        )

    def _corrected(self, batch: dict[str, Any]) -> None:
        self.inputs.append(dict(batch))


class ShownCorrection:
    """A correction that also shows each corrected batch."""

    def __init__(self, correction: Any, show: Callable[[dict[str, Any]], None]) -> None:
        self._correction, self._show = correction, show

    def __getattr__(self, name: str) -> Any:
        return getattr(self._correction, name)

    def __call__(self, batch: dict[str, Any]) -> None:
        self._correction(batch)
        self._show(batch)


def training_logs(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """The logged training steps, without evaluations and without the summary at the end."""
    return [entry for entry in trainer.state.log_history if "loss" in entry and LAST_ENTRY not in entry]
