"""One training run on rollouts of a fixed age, in one process: the trainer, and a copy of it that generates."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.setups import reverse, sums, turns
from benchmarks.setups.quiet import quiet_config
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.records import Job, RolloutGroup, Timings
from async_grpo.rollout.engine_choice import transformers_engine
from async_grpo.rollout.trl_group import to_record
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.settings import TrainingSettings
from async_grpo.setup.trl_compat import repair_trl
from async_grpo.training.corrections.rule import Rule
from async_grpo.training.job_issuer import sampling_seed
from async_grpo.training.prompts import prompt_rows
from async_grpo.training.schedule import groups_per_round
from async_grpo.training.trl_trainer import TrainingEvents, fit, latest_metrics, make_async

Weights = dict[str, torch.Tensor]

SUMS = {
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": sums.tiny.ANSWER_DIGITS + 1,
    "learning_rate": 4e-4,
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
}


class StaleRun(TrainingEvents):
    """Trains a task with rollouts that are exactly `staleness` versions old once there are so many.

    Args:
        config: what differs from the task's `GRPOConfig`.
        reuse: steps in a row that train on a group: a batch has a share of new ones, and those of the steps before.
        measured_at: steps after which `accuracies` gets the held-out accuracy, and `generated` the groups until then.
            0: before the first.
        kept_metrics: metrics whose value after each step is added to `series`.
    """

    def __init__(
        self,
        *,
        task: str,
        staleness: int,
        correction: Rule,
        seed: int,
        steps: int,
        output_dir: Path,
        config: Mapping[str, Any] | None = None,
        reuse: int = 1,
        measured_at: Sequence[int] = (),
        kept_metrics: Sequence[str] = (),
    ) -> None:
        repair_trl()
        transformers_logging.set_verbosity_error()
        torch.manual_seed(seed)
        build, self._accuracy = TASKS[task]
        self.accuracies: dict[int, float] = {}
        self.generated: dict[int, int] = {}
        self.series: dict[str, list[float]] = {name: [] for name in kept_metrics}
        self._measured_at = measured_at
        self.trainer = build(output_dir, seed, steps, **(config or {}))
        self._worker: Any = build(output_dir, seed, steps, **(config or {}))
        self._trl = RolloutTrainer(self._worker)
        self._engine = transformers_engine(self._trl)
        self._seed = seed
        self._rows = prompt_rows(self.trainer)
        self._issued = 0
        self._versions: deque[tuple[int, Weights]] = deque(maxlen=staleness + 1)  # oldest first
        self._used: deque[list[RolloutGroup]] = deque(maxlen=reuse - 1)  # that are used again; oldest first
        make_async(self.trainer, self, correction=correction, settings=TrainingSettings())

    def train(self) -> float:
        """Returns the held-out accuracy after the last step."""
        fit(self.trainer, resume_from=None)
        return self.measure()

    def measure(self) -> float:
        """The held-out accuracy of the weights as they are now."""
        accuracy: float = self._accuracy(self.trainer.model, self.trainer.processing_class)
        return accuracy

    def training_begins(self) -> None:
        self._keep_version(0)
        self._measure_where_asked(0)

    def step_done(self) -> bool:
        step = self.trainer.state.global_step
        self._keep_version(step)
        metrics = latest_metrics(self.trainer)
        for name, values in self.series.items():
            values.append(metrics[name])
        self._measure_where_asked(step)
        return True

    def _measure_where_asked(self, step: int) -> None:
        if step in self._measured_at:
            self.accuracies[step], self.generated[step] = self.measure(), self._issued

    def _keep_version(self, version: int) -> None:
        weights = self.trainer.model.state_dict()
        self._versions.append((version, {name: tensor.clone() for name, tensor in weights.items()}))

    def take_groups(self, version: int) -> Sequence[RolloutGroup]:
        size = groups_per_round(self.trainer)
        used = [group for groups in self._used for group in groups]
        new = self._generate(version, size - len(used))
        self._used.append(new[-(size // (1 + (self._used.maxlen or 0))) :])
        return used + new

    def _generate(self, version: int, groups: int) -> list[RolloutGroup]:
        generated_by, weights = self._versions[0]
        self._worker.model.load_state_dict(weights)
        jobs = [self._next_job(version) for _ in range(groups)]
        with torch.random.fork_rng(devices=[]):  # a worker's randomness is not the trainer's
            sampled = self._sample([self._trl.prepare(job, generated_by) for job in jobs])
        return [
            to_record(group, self._trl.score([group])[0], attempt=0, worker="dev0", timings=Timings())
            for group in map(self._trl.finish, sampled)
        ]

    def _sample(self, prepared: Sequence[PreparedGroup]) -> list[SampledGroup]:
        sampled = self._engine.sample(prepared)
        while len(sampled) < len(prepared):
            sampled += self._engine.sample([])
        return sorted(sampled, key=lambda group: group.prepared.job.seq)

    def _next_job(self, version: int) -> Job:
        seq, self._issued = self._issued, self._issued + 1
        return Job(
            run_id="stale",
            seq=seq,
            row=next(self._rows),
            num_generations=self.trainer.num_generations,
            seed=sampling_seed(self._seed, seq),
            born_version=version,
            min_version=0,
        )


def _build_sums(output_dir: Path, seed: int, steps: int, **changes: Any) -> GRPOTrainer:
    """The demo's trainer, less evaluations, checkpoints and logs."""
    tokenizer = sums.tiny.build_tokenizer()
    return GRPOTrainer(
        model=sums.tiny.build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[sums.tiny.accuracy],
        train_dataset=sums.tiny.as_dataset(sums.tiny.split_problems()[0]),
        args=quiet_config(output_dir, seed, steps, SUMS | changes),
    )


TASKS: dict[str, tuple[Any, Any]] = {
    "sums": (_build_sums, sums.held_out_accuracy),
    "turns": (turns.build_trainer, turns.held_out_accuracy),
    "reverse": (reverse.build_trainer, reverse.held_out_accuracy),
}
