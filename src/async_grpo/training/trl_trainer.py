"""The adapter to TRL: its trainer calls `TrainingEvents` in place of its own generation and around each step.

The private names of TRL's and transformers' trainers that it touches are in the table of
`tests/integration/trl_hooks.py`; `test_trl_contract.py` there fails with the name that a new TRL has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.archive.disk_space import said_if_full
from async_grpo.errors import UnsupportedError
from async_grpo.images import images_in, opened
from async_grpo.log import logger
from async_grpo.settings import TrainingSettings
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.generated.trl_command import end_as_trl_does
from async_grpo.setup.generator_choice import refuse_late_vllm
from async_grpo.setup.overrides import HONOURED, own_dataloader
from async_grpo.setup.rank_share import own_share
from async_grpo.setup.replaced import adapter, class_of_trl, original, replaced, users_class
from async_grpo.setup.trl_compat import AllStepsDone, train_the_rest
from async_grpo.telemetry.activity import EVALUATING, TRAINING, activity
from async_grpo.training.checkpoints import BatchInUse, bytes_needed, find_best
from async_grpo.training.corrections.fresh_batch import Bound
from async_grpo.training.corrections.kept_log_probs import rows_of
from async_grpo.training.corrections.rule import Rule
from async_grpo.training.corrections.trl_loss import CorrectedLoss, correction_of
from async_grpo.training.groups_for_trl import require_columns, rollout_output, rows_for_trl
from async_grpo.training.one_dataloader import OneDataLoader
from async_grpo.training.resumed_settings import InForce, say_if_schedule_begins_again
from async_grpo.training.rollout_metrics import added_by_workers, logged_by_workers
from async_grpo.training.rollout_source import StopTraining
from async_grpo.training.sharding import read_without_pickle, refuse_unknown_sharding
from async_grpo.training.train_of_group import part_of_groups

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo.records import RolloutGroup


class TrainingEvents:
    """What happens around TRL's optimizer steps, in the order in which TRL calls it.

    Any event may raise `StopTraining`: `fit` then saves a checkpoint and returns.
    """

    def training_begins(self) -> None:
        """The model is on its device and the checkpoint is loaded. No batch has been taken."""

    def take_groups(self, version: int) -> Sequence[RolloutGroup]:
        """Return the groups of one generation batch for the trainer at policy version `version`.

        On another rank than 0, those of them that it has rows of.
        """
        raise NotImplementedError

    def step_done(self) -> bool:
        """An optimizer step has ended and is not logged yet. Return False to save a checkpoint and end."""
        return True

    def evaluation_goes_on(self) -> None:
        """One batch of an evaluation has been generated."""

    def ends_early(self) -> None:
        """`StopTraining` was raised. A last checkpoint follows."""

    def before_checkpoint(self) -> Path | None:
        """Return when the checkpoint may be written, and the folder to write it into; None: `output_dir` itself."""

    def checkpoint_written(self, checkpoint: Path) -> None:
        """transformers has written its part of `checkpoint`. Delete older ones: transformers does not."""


@adapter
class AsyncGRPOMixin(CorrectedLoss):
    """Put before the user's trainer class: finished rollouts of workers take the place of TRL's own generation.

    TRL still computes advantages, masks, losses and its metrics. Evaluation stays wholly TRL's: it generates here.
    """

    events: TrainingEvents
    batch_after_step: BatchInUse | None = None  # that the last optimizer step left unfinished
    random_before_data: torch.Tensor | None = None  # torch's state before the epoch's data, until its first step
    saved_at: int | None = None  # the optimizer step of the newest checkpoint of this process
    train_of_group: int | None = None  # completions of each group that are trained on; None: all
    _saves_into: Path | None = None  # in place of output_dir, while a checkpoint is written
    _resumed_from: Path | None = None
    _serving: Sequence[RolloutGroup] | None = None  # the groups of the batch that TRL is assembling
    _prompts: dict[int, Any]  # by row: that it was sampled from, where it is not the dataset's
    _tools: tuple[Any, Any]  # the user's tools and environment factories, while it does

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        groups = self.events.take_groups(self.state.global_step)
        rows = own_share(self, [row for group in groups for row in rows_for_trl(group)])
        with_own = own_share(self, [bool(group.prompts) for group in groups for _ in range(group.job.num_generations)])
        self._prompts = {index: row["prompt"] for index, row in enumerate(rows) if with_own[index]}
        with _serving(self, groups, rows):
            output: dict[str, Any] = super()._generate_and_score_completions(rows)
            output |= self.kept_columns()
        output |= _ages_and_lengths(self, groups, output["advantages"].device)
        if self.train_of_group is not None:
            output = part_of_groups(self, output, len(rows))
        self.correct(output)
        return output

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._serving is None:
            return super()._generate(prompts)
        for row, prompt in self._prompts.items():  # an override may have changed it again
            prompts[row] = prompt
        # Not the user's override: it has run in the worker, and what it made of the tokens was rewarded.
        result: tuple[Any, ...] = original(class_of_trl(self), "_generate")(self, prompts)
        self.tokens_are_there()
        completions = own_share(self, [x for group in self._serving for x in opened(group.completions)])  # with tools
        self.tools, self.environment_factories = self._tools  # TRL renders the prompts of images again, with them
        tool_images = [images_in(completion, role="tool") for completion in completions]
        images = [images_in(prompt) + more for prompt, more in zip(prompts, tool_images, strict=True)]
        return (*result[:3], completions, *result[4:6], images if any(images) else None, tool_images)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any) -> torch.Tensor:
        if self._serving is None:
            return super()._calculate_rewards(inputs, prompts, completions, *args)
        for name, value in logged_by_workers(self._serving) if self.accelerator.is_main_process else ():
            self._log_metric(name, value)  # TRL adds up the ranks'
        for mode, name, values in added_by_workers(self._serving) if self.accelerator.is_main_process else ():
            self._metrics[mode][name] += values
        for column in sorted({column for group in self._serving for column in group.extra_columns}):
            each = [group.extra_columns.get(column, [None] * len(group.rewards)) for group in self._serving]
            self._log_completion_extra(column, own_share(self, [value for values in each for value in values]))
        own_rewards = own_share(self, torch.cat([torch.from_numpy(group.rewards) for group in self._serving]))
        rewards: torch.Tensor = self.accelerator.gather(own_rewards.to(self.accelerator.device))
        if isinstance(self, Algorithm):
            require_columns(self, self._serving)
            self.take_rewards(rewards, self._serving)
        return rewards

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL does. Where its table of completions cannot hold what workers sent, the training goes on without."""
        mode = "train" if self.model.training else "eval"
        try:
            super().log(logs, start_time)
        except Exception as error:
            is_logged = not self._metrics[mode]  # TRL clears them before it makes the table
            if not (self.log_completions and is_logged) or "log" in replaced(self):
                raise
            _warn_once(f"{type(error).__name__}: {error}"[:300])

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._saves_into is None else str(self._saves_into)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As transformers does, but into the folder that `before_checkpoint` names. A hub gets it from its place."""
        args, name = self.args, f"checkpoint-{self.state.global_step}"
        final = Path(self._get_output_dir(trial)) / name
        with said_if_full(final.parent, bytes_needed(self), name):
            self._saves_into = self.events.before_checkpoint()
            written = Path(self._get_output_dir(trial)).absolute() / name
            push, args.push_to_hub = args.push_to_hub, False
            try:
                super()._save_checkpoint(model, trial)
            finally:
                args.push_to_hub, self._saves_into = push, None
            self._name_best_checkpoint(written, final)
            self.events.checkpoint_written(written)
        self.saved_at = self.state.global_step
        if push:
            self._push_from_checkpoint(str(final))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        self.random_before_data = torch.random.get_rng_state()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As transformers does. Then the settings of this start are in force, not those of the checkpoint."""
        settings = InForce.of(self.optimizer, self.lr_scheduler)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and not self.is_deepspeed_enabled:
            say_if_schedule_begins_again(Path(checkpoint) / SCHEDULER_NAME)
            settings.put_back(self.optimizer, self.lr_scheduler, self.state.global_step)

    def _name_best_checkpoint(self, written: Path, final: Path) -> None:
        """Where this checkpoint is the best so far, its state names the path that it will have."""
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).absolute() == written:
            self.state.best_model_checkpoint = str(final)
            if self.args.should_save:
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))


@cache
def _warn_once(error: str) -> None:
    logger.warning("a step's completions cannot be logged ({}); the training goes on", error)


@contextmanager
def _serving(trainer: Any, groups: Sequence[RolloutGroup], rows: Sequence[dict[str, Any]]) -> Iterator[None]:
    """While TRL assembles the batch: rollouts come from `groups`; tools and environments have already run."""
    saved = (trainer.rollout_func, trainer.tools, trainer.environment_factories, trainer.environments)
    trainer._serving, trainer._tools = groups, (trainer.tools, trainer.environment_factories)
    if trainer.environment_factories is not None:
        trainer._batch_environments = [row.get("environment") if trainer._multi_environment else None for row in rows]
    output = {name: own_share(trainer, values) for name, values in rollout_output(groups).items()}
    trainer.rollout_func = _served_once(output)
    trainer.tools, trainer.environment_factories, trainer.environments = [], None, None
    trainer.begin_batch(_kept_rows(trainer, groups))
    try:
        yield
    finally:
        trainer.end_batch()
        trainer.rollout_func, trainer.tools, trainer.environment_factories, trainer.environments = saved
        trainer._serving = None


def _served_once(completions: dict[str, list[Any]]) -> Callable[[list[Any], GRPOTrainer], dict[str, list[Any]]]:
    """A `rollout_func` for one batch. A class that samples again while it is assembled would get the same ones."""
    left = [completions]

    def rollout_func(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        if not left:
            raise UnsupportedError(
                f"{users_class(trainer)} makes completions twice for one generation batch, and "
                "the workers have made them once. Call _generate_and_score_completions again in _prepare_inputs, where "
                "each call gets another batch, or train in one process (without --distributed)."
            )
        return left.pop()

    return rollout_func


def _kept_rows(trainer: Any, groups: Sequence[RolloutGroup]) -> Any:
    """The sets of kept tokens of this process's rows; None where no rank has any.

    All ranks compute log-probabilities by the same calls: where weights are sharded, they meet in them.
    """
    here = any(group.kept_tokens is not None for group in groups)
    own = torch.tensor([here], dtype=torch.bool, device=trainer.accelerator.device)
    return own_share(trainer, rows_of(groups)) if trainer.accelerator.gather(own).any() else None


def _ages_and_lengths(trainer: Any, groups: Sequence[RolloutGroup], device: torch.device) -> dict[str, torch.Tensor]:
    """The version that sampled each completion of the batch, and whether it is longer than the median of all ranks'."""
    versions = [group.policy_version for group in groups for _ in range(group.job.num_generations)]
    lengths = own_share(trainer, [length for group in groups for length in group.completion_lengths.tolist()])
    own = torch.tensor(lengths, dtype=torch.long, device=device)
    middle = median(trainer.accelerator.gather(own).tolist())
    return {
        "policy_version": torch.tensor(own_share(trainer, versions), dtype=torch.long, device=device),
        "is_long": own > middle,
    }


def make_async(
    trainer: GRPOTrainer,
    events: TrainingEvents,
    *,
    correction: Rule,
    fresh: Bound | None = None,
    settings: TrainingSettings,
) -> None:
    """Give this very trainer object a class that takes its rollouts from `events`.

    Weights are published once the user's callbacks have heard that the training begins or a step ends, and may have
    changed them. transformers' own progress bar and printer give way to the run's step line; a subclass is the user's.
    """
    trainer.correct = correction_of(trainer, correction, partial(append_metric, trainer), fresh)
    bases = (AsyncGRPOMixin, OneDataLoader) if own_dataloader(trainer) else (AsyncGRPOMixin,)
    _take_methods_off(trainer, {name for base in bases for cls in base.__mro__[:-1] for name in vars(cls)})
    trainer.__class__ = adapter(type(f"Async{type(trainer).__name__}", (*bases, type(trainer)), {}))
    trainer.events, trainer.padding, trainer.train_of_group = events, settings.padding, settings.train_of_group
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [it for it in callbacks if type(it) not in (ProgressCallback, PrinterCallback)]
    callbacks.insert(0, _EventsCallback(trainer))
    callbacks.append(_LastCallback(trainer))


def _take_methods_off(trainer: Any, names: set[str]) -> None:
    """Make those that were assigned to the trainer object methods of its class, which ours then call."""
    own, cls = vars(trainer), type(trainer)
    assigned = {name: staticmethod(own.pop(name)) for name in names & own.keys() & HONOURED.keys()}
    if assigned:
        trainer.__class__ = type(cls.__name__, (cls,), {**assigned, "__module__": cls.__module__})


class _EventsCallback(TrainerCallback):
    """Passes transformers' callbacks on to the trainer's `events`."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        find_best(state, self.trainer._resumed_from)
        state.compute_steps(args, state.max_steps)  # a checkpoint's state has the intervals of its own settings
        if state.global_step >= state.max_steps:
            raise AllStepsDone

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.random_before_data = torch.random.get_rng_state()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        activity.progress()  # a micro-batch of a step that accumulates gradients

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self.trainer
        passes = trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations)
        # The generation batch that TRL is in the middle of, None between two.
        trainer.batch_after_step = BatchInUse(passes, trainer._buffered_inputs) if passes else None
        self.trainer.random_before_data = None

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        activity.doing(EVALUATING)
        activity.progress()
        self.trainer.events.evaluation_goes_on()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        activity.doing(TRAINING)


class _LastCallback(TrainerCallback):
    """Begins the training and ends its steps, after the user's callbacks and before anything is logged or saved.

    Where one of these ends the training, its weights are saved: there is no script behind `train()` that could do it.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer: Any = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.events.training_begins()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        should_log = control.should_log
        if not self.trainer.events.step_done():
            control.should_training_stop = control.should_save = True
        control.should_log = should_log  # transformers takes it back when an evaluation is logged meanwhile
        self.on_log(args, state, control)

    def on_log(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        ends = control.should_training_stop and self.trainer.saved_at != state.global_step < state.max_steps
        if ends and not control.should_save:
            logger.info("a callback ends the training at step {} of {}", state.global_step, state.max_steps)
            control.should_save = True

    on_evaluate = on_epoch_end = on_log


def fit(trainer: GRPOTrainer, resume_from: Path | None) -> bool:
    """Train to the last step, or until an event raises `StopTraining`: then save a checkpoint and return.

    False if there was nothing to do: the checkpoint is at the last step.
    """
    # transformers deletes no checkpoint: its rotation takes those of other runs, and a user's own, with it.
    limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
    trainer._resumed_from = resume_from
    if trainer.is_deepspeed_enabled:
        read_without_pickle()
    try:
        if not train_the_rest(trainer, resume_from):
            logger.info("nothing to train: {} is at step {}, the last", resume_from, trainer.state.global_step)
            end_as_trl_does(trainer)
            return False
    except StopTraining:  # raised in the middle of a step, so TRL's own loop saves nothing
        trainer.events.ends_early()
        if trainer.random_before_data is not None:  # a resume opens the epoch's data again, which draws a number
            torch.random.set_rng_state(trainer.random_before_data)
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    finally:
        trainer.args.save_total_limit = limit
    return True


def refuse_unsupported(trainer: GRPOTrainer) -> None:
    """Raise `UnsupportedError`, with the way out, for what cannot run distributed yet."""
    refuse_unknown_sharding(trainer)
    refuse_late_vllm(trainer)
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise UnsupportedError(
            "The model has no parameter that trains. If it is an adapter that was loaded, load it with "
            "PeftModel.from_pretrained(..., is_trainable=True), or pass `peft_config` for a new one."
        )
    _refuse_virtual_tokens(trainer.model)
    columns = getattr(trainer.train_dataset, "column_names", None)  # None: they are not known before the rows are
    if columns and "prompt" not in columns:
        raise UnsupportedError(
            f"train_dataset has no column `prompt`, which TRL and the workers read; it has: {', '.join(columns)}. Name "
            "the right one so: dataset.rename_column(..., 'prompt')."
        )


def _refuse_virtual_tokens(model: Any) -> None:
    for config in getattr(model, "peft_config", {}).values():
        if config.is_prompt_learning:
            raise UnsupportedError(
                f"{type(config).__name__}: the adapter puts {config.num_virtual_tokens} virtual tokens before the "
                "padding of the prompts, so what the model computes depends on how far its batch is padded, and "
                "workers sample in other batches than the trainer trains on. Take an adapter that changes layers, such "
                "as LoraConfig, or train in one process (without --distributed)."
            )


def name_the_cpu(trainer: GRPOTrainer) -> None:
    """Let several ranks on a CPU load checkpoints: accelerate calls their device `cpu:0`, which torch.load refuses."""
    if trainer.args.device == torch.device("cpu", 0):
        vars(trainer.args)["_setup_devices"] = torch.device("cpu")


def train_sampler(trainer: GRPOTrainer) -> Iterable[int]:
    """The sampler that TRL's own dataloader would use, fresh."""
    return trainer._get_train_sampler(trainer.train_dataset)


def used_columns(trainer: GRPOTrainer, dataset: Any, description: str = "training") -> Any:
    """A dataset without the columns that `remove_unused_columns=True` would take out."""
    return trainer._remove_unused_columns(dataset, description=description)


def uniform_rewards(trainer: GRPOTrainer) -> Callable[[RolloutGroup], bool]:
    """Return a test whether a group teaches nothing: by the trainer's algorithm, or by TRL's advantages."""
    if isinstance(trainer, Algorithm):
        return trainer.teaches_nothing
    rule = AdvantageRule(
        reward_weights=tuple(trainer.reward_weights.tolist()),
        scale_rewards=str(trainer.scale_rewards),
        multi_objective_aggregation=str(trainer.multi_objective_aggregation),
    )
    return lambda group: rule.teaches_nothing(group.rewards)


def append_metric(trainer: GRPOTrainer, name: str, value: float) -> None:
    """Add a value to TRL's training metrics, which are averaged over a logging interval."""
    trainer._metrics["train"][name].append(value)


def latest_metrics(trainer: GRPOTrainer) -> dict[str, float]:
    """The newest value of each of TRL's training metrics that it has not logged yet."""
    return {name: values[-1] for name, values in trainer._metrics["train"].items() if values}


def go_on_with(trainer: GRPOTrainer, batch: BatchInUse) -> None:
    """Let TRL continue in the middle of a batch, before the first step of a resumed run."""
    trainer._step, trainer._buffered_inputs = batch.passes_done, list(batch.inputs)
    trainer.batch_after_step = batch
