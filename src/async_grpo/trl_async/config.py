"""What TRL's `AsyncGRPOConfig` asks of rollouts: what the workers are told, what is refused, how far jobs go ahead."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from async_grpo.errors import UnsupportedError
from async_grpo.setup.grpo_config.values import as_set
from async_grpo.training.schedule import Schedule

if TYPE_CHECKING:
    from trl.experimental.async_grpo import AsyncGRPOConfig

SAMPLING = (  # fields that the workers' `GRPOConfig` has, too: they sample in the trainer's precision
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "chat_template_kwargs",
    "max_tool_calling_iterations",
    "bf16",
    "fp16",
)
_OWN_SERVER = "it is about the vLLM server of TRL's own worker. These workers bring their own engine (generator=...)"
NOT_KEPT = {
    "vllm_server_base_url": _OWN_SERVER,
    "vllm_server_timeout": _OWN_SERVER,
    "request_timeout": _OWN_SERVER,
    "queue_maxsize": "a group comes into TRL's queue when TRL asks for its first sample, and not before",
    "fork_threshold_tokens": "these workers make one training row of a dialogue, so none is ever forked",
    "log_completions": "the run directory keeps every completion. See them with `async-grpo rollouts RUN_DIR`",
    "num_completions_to_print": "the run directory keeps every completion. See them with `async-grpo rollouts RUN_DIR`",
}
FIRST_VERSION = 1  # TRL sends its weights once before the first step


def refuse(args: AsyncGRPOConfig) -> None:
    """Raise `UnsupportedError` for settings that rollouts of the queue cannot keep."""
    if args.token_budget is None or args.token_budget > 0:
        raise UnsupportedError(
            f"token_budget={args.token_budget} makes the number of samples of a step depend on their lengths, and jobs "
            "are issued ahead by that number. Set token_budget=0 in AsyncGRPOConfig: each micro-batch then has "
            "per_device_train_batch_size samples."
        )
    defaults = {field.name: field.default for field in fields(args)}
    for name, why in NOT_KEPT.items():
        if getattr(args, name) != defaults[name]:
            raise UnsupportedError(
                f"{name}={getattr(args, name)!r} of AsyncGRPOConfig has no effect here: {why}. Leave it out."
            )
    if args.max_inflight_tasks not in (-1, _inflight_by_trl(args)):
        raise UnsupportedError(
            f"max_inflight_tasks={args.max_inflight_tasks} of AsyncGRPOConfig has no effect here: jobs are issued as "
            "far ahead as max_staleness admits. Leave it out."
        )
    late = _updates_within_a_group(args)
    if args.max_staleness < late:
        raise UnsupportedError(
            f"max_staleness={args.max_staleness} cannot be kept: TRL's trainer fetches one micro-batch ahead, and "
            f"takes the {args.num_generations} completions of a prompt over up to {late} updates of the weights. Set "
            f"max_staleness to at least {late}, or gradient_accumulation_steps=1 and per_device_train_batch_size to a "
            "multiple of num_generations."
        )


def worker_values(args: AsyncGRPOConfig) -> dict[str, str]:
    """The fields of the workers' `GRPOConfig` that TRL's configuration decides, as `--set` has them.

    Their batch is what one version is trained on, in whole groups: engines build their batches by it.
    """
    groups = max(1, _samples_per_version(args) // args.num_generations)
    batch = {
        "num_generations": args.num_generations,
        "per_device_train_batch_size": args.num_generations * groups,
        "gradient_accumulation_steps": 1,
    }
    sampling = {name: getattr(args, name) for name in SAMPLING}
    return {name: as_set(name, value) for name, value in (batch | sampling).items()}


def schedule_of(args: AsyncGRPOConfig) -> Schedule:
    """Rounds of what TRL's trainer fetches at a time, counted in samples: a micro-batch, where that is whole groups.

    Else a round is one group. The last sample of a group may be fetched some versions after the first, and is to be in
    time as well.
    """
    groups, left = divmod(_micro_batch(args), args.num_generations)
    groups = 1 if left else groups
    return Schedule(
        groups_per_round=groups,
        micro_steps_per_round=groups * args.num_generations,
        micro_steps_per_version=_samples_per_version(args),
        max_staleness=args.max_staleness - _updates_within_a_group(args),
        first_version=FIRST_VERSION,
    )


def last_version(args: AsyncGRPOConfig) -> int | None:
    """The version that samples the last batch; None where the number of steps is not known yet."""
    return FIRST_VERSION + (args.max_steps - 1) // args.weight_sync_steps if args.max_steps > 0 else None


def _inflight_by_trl(args: AsyncGRPOConfig) -> int:
    """What TRL's trainer writes in place of -1, into a configuration that may be used again."""
    return max(args.max_staleness, 1) * _micro_batch(args) * int(args.gradient_accumulation_steps)


def _samples_per_version(args: AsyncGRPOConfig) -> int:
    return int(_micro_batch(args) * args.gradient_accumulation_steps * args.weight_sync_steps)


def _micro_batch(args: AsyncGRPOConfig) -> int:
    return int(args.per_device_train_batch_size * args.world_size)


def _updates_within_a_group(args: AsyncGRPOConfig) -> int:
    """How many times the weights are sent, at most, between the first and the last sample of a group.

    accelerate's dispatcher fetches a micro-batch before it hands out the one before, so version v takes the samples
    from `(v - 1) * per_version + micro_batch` on.
    """
    group, per_version = args.num_generations, _samples_per_version(args)
    starts = [index * group - _micro_batch(args) for index in range(per_version + 1)]
    return max((start + group - 1) // per_version - start // per_version for start in starts)
