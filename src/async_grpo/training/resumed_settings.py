"""Settings that a checkpoint brings back, where a resume has other ones: each is applied, refused, or said to be kept.

transformers loads the optimizer's groups, the schedule's base rates and its own intervals over those that it has just
built from the configuration. `InForce` puts the new ones back. Settings that no checkpoint holds are in no table here:
the trainer is built with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from async_grpo.errors import RunDirError
from async_grpo.log import logger

if TYPE_CHECKING:
    from trl import GRPOTrainer

_OTHER_STATE = "the checkpoint has the state of the optimizer as it was"
_OTHER_SCALER = "the checkpoint has the state of the loss scaler, or has none, as it was"
_JUDGED = "the best checkpoint so far was found by it"

APPLIED = {
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), "optimizer"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"), "schedule"),
    **dict.fromkeys(("max_steps", "num_train_epochs"), "length of the schedule"),
    **dict.fromkeys(("logging_steps", "save_steps", "eval_steps"), "trainer's state"),
}
"""By field, what of a checkpoint holds the old value. The new one is in force from the first step of the resume."""

REFUSED = {
    **dict.fromkeys(("optim", "optim_args", "optim_target_modules"), _OTHER_STATE),
    "fp16": _OTHER_SCALER,
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), _JUDGED),
    "critic_model": "the checkpoint has the critic as it was",
    "num_generations": "finished groups that wait to be trained on have as many completions as it was",
}
"""By field, why another value cannot be used with the checkpoint."""

KEPT = {
    "data_seed": "TRL draws the prompts by --seed, so their order stays as it was",
    "ignore_data_skip": "the run continues after the prompts that it has used",
}
"""By field, what stays as it was, whatever the value."""

OF_THE_BATCH = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    *("num_iterations", "beta", "gamma", "lam", "kl_in_reward", "kl_penalty"),
)
"""Fields by which a generation batch was made. A checkpoint in the middle of one needs them as they were."""

_STATEFUL_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # their state has the rate and their own settings
_OF_A_GROUP = ("initial_lr", "weight_decay", "betas", "eps")


def check_settings(
    trainer: GRPOTrainer, before: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path, *, in_batch: bool
) -> None:
    """Say which settings stay as they were.

    Args:
        before, now: the `trainer` part of `hyperparameters.json`, of the run's last process and of this one.
        in_batch: the checkpoint is in the middle of a generation batch.

    Raises:
        RunDirError: a setting is another one, and cannot be used with the checkpoint.
    """
    for name, reason in _reasons(trainer, before, now, in_batch=in_batch):
        was, now_is = before.get(name), now.get(name)
        if was != now_is:
            raise RunDirError(
                f"{name} is {now_is}, and was {was}: {reason}. Set it as it was, or begin another run with "
                f"--run-dir OTHER, whose model may be {checkpoint}."
            )
    for name, fact in KEPT.items():
        if before.get(name) != now.get(name):
            logger.warning("{}={} changes nothing in a resumed run: {}", name, now.get(name), fact)


def _reasons(
    trainer: GRPOTrainer, before: Mapping[str, Any], now: Mapping[str, Any], *, in_batch: bool
) -> Iterator[tuple[str, str]]:
    """Each field that may not differ between `before` and `now`, with the reason."""
    for name, reason in REFUSED.items():
        if reason is not _JUDGED or before.get(name) is not None:
            yield name, reason
    if in_batch:
        yield from ((name, "the checkpoint is in the middle of a generation batch made by it") for name in OF_THE_BATCH)
    schedule = {str(settings.get("lr_scheduler_type")) for settings in (before, now)} & {*_STATEFUL_SCHEDULES}
    if schedule:
        reason = f"the state of the schedule {schedule.pop()} in the checkpoint holds it"
        yield from ((name, reason) for name in ("lr_scheduler_type", "lr_scheduler_kwargs", "learning_rate"))
    if trainer.is_deepspeed_enabled:
        restored = [name for name, where in APPLIED.items() if where in ("optimizer", "schedule")]
        yield from ((name, "DeepSpeed brings it back with the checkpoint") for name in restored)


def say_if_schedule_begins_again(saved: Path) -> None:
    """Warn where the file `saved` is not in its checkpoint, and so no optimizer either."""
    if not saved.exists():
        logger.warning(
            "{} has no optimizer and no schedule (save_only_model): the optimizer begins again, and the learning rate "
            "with its first step",
            saved.parent,
        )


@dataclass(frozen=True, slots=True)
class InForce:
    """Values that the configuration gives an optimizer and its schedule: take them before a checkpoint is loaded."""

    groups: list[dict[str, Any]]  # of each of the optimizer's groups
    base_rates: list[Any] | None  # of the schedule; None: it has no such

    @classmethod
    def of(cls, optimizer: Any, schedule: Any) -> InForce:
        """Take the values of an optimizer and a schedule that were just built."""
        groups = [{name: group[name] for name in _OF_A_GROUP if name in group} for group in optimizer.param_groups]
        rates = getattr(schedule, "base_lrs", None)
        return cls(groups, None if rates is None else list(rates))

    def put_back(self, optimizer: Any, schedule: Any, step: int) -> None:
        """Put the values in force again after the state of a checkpoint, of optimizer step `step`, was loaded."""
        if type(schedule) is not LambdaLR:  # how its rate follows from its base is not known
            if (restored := getattr(schedule, "base_lrs", None)) != self.base_rates:
                logger.warning("the schedule keeps the checkpoint's base rates {}, not {}", restored, self.base_rates)
            turns_momentum = getattr(schedule, "cycle_momentum", False)  # with the rate, as OneCycleLR does
            self._fill(optimizer, without=("initial_lr", "betas") if turns_momentum else ("initial_lr",))
            return
        self._fill(optimizer)
        before, bases = schedule.get_last_lr(), list(self.base_rates or ())
        rates = [base * factor(schedule.last_epoch) for base, factor in zip(bases, schedule.lr_lambdas, strict=True)]
        schedule.load_state_dict({**schedule.state_dict(), "base_lrs": bases, "_last_lr": rates})
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if rates != before:
            logger.info(
                "the learning rate of step {} is {:.3g}, and would be {:.3g} with the checkpoint's settings: the rate, "
                "the schedule or the number of steps is another one",
                *(step + 1, float(rates[0]), float(before[0])),
            )

    def _fill(self, optimizer: Any, without: Sequence[str] = ()) -> None:
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            group.update({name: value for name, value in values.items() if name not in without})
