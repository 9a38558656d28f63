"""Finished groups as TRL is given them, and the refusal of a group that it could not train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.errors import BadFileError, UnsupportedError
from async_grpo.images import images_in, opened
from async_grpo.records import RolloutGroup
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.fingerprints import whole_shape
from async_grpo.setup.replaced import users_class
from async_grpo.training.corrections.kept_log_probs import rows_of
from async_grpo.training.rollout_metrics import added_by_workers, logged_by_workers

if TYPE_CHECKING:
    from trl import GRPOTrainer

LOWEST_LOGPROB = -1e4  # no sampler draws a token of so small a probability
HIGHEST_LOGPROB = 0.1  # what rounding in bf16 leaves above 0


def refuser_of(trainer: GRPOTrainer, *, reached: int = 0) -> Callable[[RolloutGroup], None]:
    """A function that raises `BadFileError` for a group that this trainer cannot train on.

    What a worker sent must never end the server: a resume would take the same group again. So each group is made ready
    for TRL once, alone, when it comes.

    Args:
        reached: the newest version of the run before it was resumed, which may have sampled groups.
    """
    names = trainer.reward_func_names
    tokens, _ = whole_shape(trainer.model.get_input_embeddings().weight)

    def refuse(group: RolloutGroup) -> None:
        try:
            rows = rows_for_trl(group)
            rollout_output([group])
            for prompt, completion in zip([row["prompt"] for row in rows], opened(group.completions), strict=True):
                images_in(prompt)
                images_in(completion, role="tool")
            [*logged_by_workers([group]), *added_by_workers([group])]
            rows_of([group])
            require_columns(trainer, [group])
        except Exception as error:
            raise BadFileError(f"it cannot be trained on: {type(error).__name__}: {error}") from error
        newest = max(reached, trainer.state.global_step)
        if reason := _unfit(group, tokens) or _of_other_rewards(group, names) or _of_no_version(group, newest):
            raise BadFileError(reason)

    return refuse


def require_columns(trainer: GRPOTrainer, groups: Sequence[RolloutGroup]) -> None:
    """Raise `UnsupportedError` for a group without a column that the trainer's algorithm needs."""
    for name in trainer.group_columns if isinstance(trainer, Algorithm) else ():
        for group in groups:
            if getattr(group, name) is None:
                raise UnsupportedError(
                    f"Prompt group {group.job.seq} has no {name.replace('_', ' ')}: it was made with another trainer "
                    f"than {users_class(trainer)}. Train on it with that one, or start a new run."
                )


def _unfit(group: RolloutGroup, tokens: int) -> str:
    """What TRL would end with, or what would spoil the weights. Empty: nothing."""
    prompts = np.asarray([group.prompt_ids.size]) if group.prompt_lengths is None else group.prompt_lengths
    if not prompts.all() or not group.completion_lengths.all():
        return "it has a prompt or a completion without tokens"
    if not all(group.prompts):
        return "it has an empty prompt"
    largest = max(ids.max() for ids in (group.prompt_ids, group.completion_ids))
    if largest >= tokens:
        return f"it has token {largest}, and the model has {tokens} tokens"
    low, high = group.sampling_logprobs.min(), group.sampling_logprobs.max()
    if low < LOWEST_LOGPROB or high > HIGHEST_LOGPROB:
        return f"its log-probabilities go from {low:.3g} to {high:.3g}"
    return ""


def _of_other_rewards(group: RolloutGroup, names: Sequence[str]) -> str:
    own = list(group.reward_names)
    return "" if group.rewards.shape[1] == len(names) else f"its rewards are of {own}, and the trainer has {[*names]}"


def _of_no_version(group: RolloutGroup, newest: int) -> str:
    versions = [group.policy_version, *([] if group.token_versions is None else [int(group.token_versions.max())])]
    if group.job.min_version <= min(versions) and max(versions) <= newest:
        return ""
    return f"it is of version {max(versions)}, and those from {group.job.min_version} to {newest} may sample it"


def rows_for_trl(group: RolloutGroup) -> list[dict[str, Any]]:
    """The group's dataset row once per completion, with the prompt that the completion was sampled from."""
    row = {"prompt": [{"role": "user", "content": ""}], **opened(group.job.row)}  # TRL's placeholder, of format 2
    prompts = opened(group.prompts) or [row["prompt"]]
    if group.prompts:  # they hold their images
        row |= dict.fromkeys(row.keys() & {"image", "images"})
    return [{**row, "prompt": prompts[index % len(prompts)]} for index in range(group.job.num_generations)]


def rollout_output(groups: Sequence[RolloutGroup]) -> dict[str, list[Any]]:
    """What TRL expects of a `rollout_func`: one entry per completion, B*G in all."""
    output: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    with_masks = any(group.tool_mask is not None for group in groups)
    output |= {"env_mask": []} if with_masks else {}
    for group in groups:
        lengths = group.completion_lengths
        one = [group.prompt_ids.tolist()] * len(lengths)
        output["prompt_ids"] += one if group.prompt_lengths is None else _cut(group.prompt_ids, group.prompt_lengths)
        output["completion_ids"] += _cut(group.completion_ids, lengths)
        output["logprobs"] += _cut(group.sampling_logprobs, lengths)
        if with_masks:
            output["env_mask"] += group.masks()
    return output


def _cut(flat: np.ndarray, lengths: np.ndarray) -> list[list[Any]]:
    """`[a, b, c]`, lengths `[1, 2]` -> `[[a], [b, c]]`."""
    values, ends = flat.tolist(), list(accumulate(lengths.tolist()))
    return [values[begin:end] for begin, end in zip([0, *ends], ends)]
