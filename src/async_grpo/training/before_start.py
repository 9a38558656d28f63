"""What is refused, and what is said, before a training starts: the same for a start and for its dry run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from async_grpo.errors import UsageError
from async_grpo.formatting import counted, size
from async_grpo.log import logger
from async_grpo.rundir.paths import RunState
from async_grpo.settings import TrainingSettings
from async_grpo.setup import fingerprints
from async_grpo.setup.algorithm import Algorithm, compares_groups, gradients_besides
from async_grpo.setup.generator_choice import Capabilities, choose_generator
from async_grpo.setup.needs import check_needs
from async_grpo.setup.openai_harness import check_agent
from async_grpo.setup.overrides import check_callbacks, check_fields, check_overrides, describe_overrides
from async_grpo.setup.replaced import replaced_by_user
from async_grpo.setup.sampling import check_sampling, refuse_guided
from async_grpo.tasks.gradients import OF_BATCHES
from async_grpo.training import trl_trainer
from async_grpo.training.choosing import refuse_choosing
from async_grpo.training.corrections.checks import check, describe, describe_noise
from async_grpo.training.corrections.rule import rule_of
from async_grpo.training.corrections.trl_loss import has_own_loss
from async_grpo.training.schedule import LARGEST_ROUND, groups_per_round, schedule_of
from async_grpo.training.sharding import refuse_publish_dtype, sharding_of
from async_grpo.training.train_of_group import refuse_part

if TYPE_CHECKING:
    from trl import GRPOTrainer

MOST_NAMED = 12  # of more tasks only the number is said


def refuse(trainer: GRPOTrainer, settings: TrainingSettings, engine: Capabilities | None) -> None:
    """Refuse, before anything is started, what cannot be trained this way. `engine` None: not known here.

    Raises:
        UnsupportedError: the trainer uses something that cannot run distributed, or not with this correction.
        UsageError: two settings exclude each other.
    """
    refuse_guided(trainer)
    if settings.deterministic and settings.filter_zero_variance:
        raise UsageError("--filter-zero-variance depends on which worker is faster, so it excludes --deterministic.")
    if settings.filter_zero_variance and not compares_groups(trainer):
        raise UsageError(
            f"--filter-zero-variance replaces groups that teach nothing, and {type(trainer).__name__} learns from "
            "equal rewards too. Leave it out."
        )
    if settings.choose_prompts:
        refuse_choosing(trainer)
    if settings.train_of_group is not None:
        refuse_part(trainer, settings.train_of_group)
    if (groups := groups_per_round(trainer)) > LARGEST_ROUND:
        raise UsageError(
            f"A generation batch of {groups:,} prompt groups is larger than the queue, which holds {LARGEST_ROUND:,}. "
            "Lower steps_per_generation or per_device_train_batch_size, or raise num_generations."
        )
    settings.check()
    refuse_publish_dtype(settings.publish_dtype, sharded=sharding_of(trainer) is not None)
    trl_trainer.refuse_unsupported(trainer)
    check_agent(trainer)
    if engine is not None:  # workers that are started by hand may have another environment
        check_needs(trainer)
    check_fields(trainer)
    check_overrides(trainer)
    check_callbacks(trainer)
    check(rule_of(settings), trainer, own_loss=has_own_loss(trainer))
    evaluated_with = settings.eval_sampling() if settings.eval_every else None
    check_sampling(trainer, settings.correction, engine, evaluated_with, deterministic=settings.deterministic)


def engine_of(trainer: GRPOTrainer, state: RunState) -> Capabilities | None:
    """Return what the launcher's workers sample with; None for workers that are started by hand."""
    on_gpu = trainer.accelerator.device.type != "cpu"
    return choose_generator(state.plan.work.generator, trainer, on_gpu=on_gpu) if state.plan.num_workers else None


def say_what_is_trained(trainer: GRPOTrainer, settings: TrainingSettings) -> None:
    """Log what of TRL the setup file replaces, what the loss is, and what of both the user may not expect."""
    if own := describe_overrides(trainer):
        logger.info("methods of TRL that the setup file replaces: {}", own)
    rule = rule_of(settings)
    if rule.name == "none":
        logger.warning("--correction none: stale rollouts are taken as fresh ones, which can destroy the policy")
    told = describe(rule, trainer, max_staleness=settings.max_staleness, own_loss=has_own_loss(trainer))
    if told:
        logger.info("{}", told)
    if told := describe_tasks(trainer):
        logger.info("tasks: {}", told)
    if told := describe_parts(trainer):
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


def describe_parts(trainer: GRPOTrainer) -> str:
    """Say that a step takes several generation batches, one as its groups come, and what sees none of the others."""
    if (parts := schedule_of(trainer, 0).rounds_per_version) == 1:
        return ""
    told = f"each of the {parts} generation batches of a step is trained on as soon as its groups are there"
    apart = of_the_batch(trainer)
    return told if not apart else f"{told}. Computed over one of them, and not over the step: {', '.join(apart)}"


def of_the_batch(trainer: GRPOTrainer) -> list[str]:
    """What TRL computes over a generation batch as a whole, so that a smaller one gives other gradients."""
    named = {
        f"the number of tokens that loss_type={trainer.loss_type} divides by": trainer.loss_type in OF_BATCHES,
        "the standard deviation of scale_rewards=batch": trainer.scale_rewards == "batch",
        "the mean and deviation of multi_objective_aggregation=normalize_then_sum": (
            trainer.multi_objective_aggregation == "normalize_then_sum"
        ),
        f"what {type(trainer).__name__} does with a batch": isinstance(trainer, Algorithm),
    }
    return [name for name, is_used in named.items() if is_used]


def describe_tasks(trainer: GRPOTrainer) -> str:
    """Say which tasks there are, and what of each a batch and the memory hold; empty without tasks.

    A trainer class that treats tasks says how in `tasks_in_words`.
    """
    parts = (_rows_of_each(trainer.train_dataset), getattr(trainer, "tasks_in_words", ""))
    held = gradients_besides(trainer)
    trained = (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
    nbytes = sum(fingerprints.count(parameter) * parameter.element_size() for parameter in trained)
    return "; ".join(filter(None, parts)) + (f", {held} × {size(nbytes)} more memory" if held else "")


def _rows_of_each(dataset: Any) -> str:
    columns = getattr(dataset, "column_names", None) or ()
    if "task" not in columns or not hasattr(dataset, "unique"):  # which a stream has not
        return ""
    tasks = dataset["task"][:]
    sources = dataset["data_source"][:] if "data_source" in columns else tasks
    named = [(task, str(source)) for task, source in zip(tasks, sources, strict=True) if isinstance(task, str) and task]
    rows, of_each = Counter(task for task, _ in named), Counter(task for task, _ in set(named))
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} tasks in {len(named):,} rows"
    more = {task: f" ({counted(found, 'source')})" if found > 1 else "" for task, found in of_each.items()}
    return ", ".join(f"{task} {count:,} row{'' if count == 1 else 's'}{more[task]}" for task, count in rows.items())
