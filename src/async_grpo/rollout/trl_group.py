"""A prompt group as TRL has it: rows and prompts, with PIL images in their places, what TRL makes of them, the scores,
and the record of it all for the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl.data_utils import prepare_multimodal_messages

from async_grpo.errors import BadGroupError, UnsupportedError
from async_grpo.images import encoded, opened
from async_grpo.records import OWN_SAMPLING, RolloutGroup, Timings
from async_grpo.tokens import NO_VERSION, Tokens
from async_grpo.tokens.kept_tokens import pack

if TYPE_CHECKING:
    from async_grpo.engines import Fields
    from async_grpo.records import Job


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GeneratedGroup:
    """The G completions of one prompt group, not scored yet, as TRL made them."""

    job: Job
    begun_by: int  # policy version
    rows: list[dict[str, Any]]  # [G], the group's dataset row, once per completion
    prompts: list[Any]  # [G]
    completions: list[Any]  # [G], text or messages
    prompt_ids: list[list[int]]  # [G]
    tokens: list[Tokens]  # [G]
    has_masks: bool  # TRL has masks of the tokens: of tools, an environment or a `rollout_func`
    environments: list[Any] | None  # [G]
    metrics: dict[str, list[float]]  # what TRL counted while generating: tool calls; `log_metric` of that code
    added: dict[str, list[float]] = field(default_factory=dict)  # to `_metrics`, by code of the user's: MODE/NAME
    let_go: Callable[[], None] | None = None  # to be called, in any thread, once its environments are not needed

    @property
    def completion_ids(self) -> list[list[int]]:
        return [tokens.ids for tokens in self.tokens]

    @property
    def version(self) -> int:
        """The oldest policy version that sampled a token."""
        versions = (version for tokens in self.tokens for version in tokens.versions if version != NO_VERSION)
        return min(versions, default=self.begun_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the reward functions returned for one group."""

    names: Sequence[str]  # [F], of the reward functions
    rewards: torch.Tensor  # [G, F], NaN for None
    metrics: dict[str, list[float]]  # `log_metric`
    added: dict[str, list[float]] = field(default_factory=dict)  # to `_metrics`: MODE/NAME
    extra_columns: dict[str, list[Any]]  # `log_extra`
    columns: dict[str, Any] = field(default_factory=dict)  # `Algorithm.group_columns`


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupOutcome:
    """What has become of a job: a group, and later its scores; or the error that ended it."""

    job: Job
    group: GeneratedGroup | None = None
    scores: Scores | None = None
    error: BaseException | None = None
    seconds: float = 0.0  # that the reward functions took


def rows_of(job: Job) -> list[dict[str, Any]]:
    """The job's row, once per completion.

    Raises:
        UnsupportedError: the job sets what no engine knows, or how completions begin, or an image cannot be read.
    """
    refuse_unknown_sampling(job)
    if job.prefix_ids:
        raise UnsupportedError(
            f"Job {job.seq} says how its completions begin (prefix_ids), and here tools, an environment, an agent or "
            "the setup file's own generation write them in several turns. Ask with a setup file without these."
        )
    row = opened(job.row)
    return [dict(row) for _ in range(job.num_generations)]


def merge_extra_fields(rows: list[dict[str, Any]], fields: dict[str, Any] | None) -> None:
    """Put the other fields that `rollout_func` returned into the rows for the reward functions, as TRL does."""
    for name, values in (fields or {}).items():
        for index, row in enumerate(rows):
            if not isinstance(values, list):
                row[name] = values
            elif index < len(values):
                row[name] = values[index]


def parts_of(sizes: Sequence[int]) -> list[slice]:
    """The slices of groups of these sizes that lie one after the other."""
    ends = [*accumulate(sizes)]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def joined(groups: Sequence[GeneratedGroup]) -> GeneratedGroup:
    """The completions of several groups one after the other, as if they were of one."""
    names = ["rows", "prompts", "completions", "tokens"]
    if groups[0].environments is not None:
        names.append("environments")
    lists: dict[str, Any] = {name: [*chain.from_iterable(getattr(group, name) for group in groups)] for name in names}
    return replace(groups[0], **lists)


def divided(scores: Scores, parts: Sequence[slice], columns: Sequence[dict[str, Any]]) -> list[Scores]:
    """The scores of each group, with its columns, of those of one call. What the call logged counts once.

    Raises:
        ValueError: a column of `log_extra` has not one value a completion, so whose they are is unknown.
    """
    size = len(scores.rewards)
    for name, values in scores.extra_columns.items():
        if len(values) % size:
            raise ValueError(f"log_extra({name!r}) has {len(values)} values for {size} completions.")
    each = [
        replace(
            scores,
            rewards=scores.rewards[part],
            extra_columns={
                name: [one for start in range(0, len(values), size) for one in values[start : start + size][part]]
                for name, values in scores.extra_columns.items()  # once for each function that logs
            },
            columns=of_group,
        )
        for part, of_group in zip(parts, columns, strict=True)
    ]
    return [each[0], *(replace(one, metrics={}, added={}) for one in each[1:])]


def refuse_unknown_sampling(job: Job, *, guided: bool = False) -> None:
    """Raise `UnsupportedError` where a job sets what is not known, or asks a trainer for guidance that has none."""
    if unknown := sorted(job.sampling.keys() - set(OWN_SAMPLING)):
        raise UnsupportedError(
            f"Job {job.seq} sets {', '.join(unknown)}. A job may set {', '.join(OWN_SAMPLING)} and nothing else."
        )
    if "eta" in job.sampling and not guided:
        raise UnsupportedError(
            f"Job {job.seq} sets eta, the strength of guidance, and this worker's trainer is not guided, or samples by "
            "turns. Return guided(trainer, …) from the setup file, or evaluate without --eval-eta."
        )


def prompt_of(row: dict[str, Any]) -> Any:
    """The row's prompt, with the images of its columns `images` or `image` where TRL puts them."""
    prompt = row["prompt"]
    if "images" in row:
        images = row["images"]
    elif "image" in row:
        images = None if row["image"] is None else [row["image"]]
    else:
        return prompt
    return prepare_multimodal_messages(prompt, images=images) if isinstance(prompt, list) else prompt


def as_fields(fields: dict[str, Any]) -> Fields:
    """What the processor returned, as `PreparedGroup` has it: as TRL hands it to `generate`."""
    return {
        name: value if _is_per_token(value) else torch.from_numpy(np.array(value)) for name, value in fields.items()
    }


def _is_per_token(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def refuse_written_images(config: Any, completions: Sequence[Tokens]) -> None:
    """Raise `UnsupportedError` where the model itself wrote a token that stands for an image.

    The trainer's forward pass finds more such tokens than images then, and TRL ends with an error.
    """
    marks = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")} - {None}
    for tokens in completions:
        if not marks.isdisjoint(token for token, mask in zip(tokens.ids, tokens.mask, strict=True) if mask):
            raise UnsupportedError(
                "The model wrote a token that stands for an image, and there is none for it to train with. A trained "
                "model hardly ever does so; if many groups fail with this, check the model and its chat template."
            )


def to_record(group: GeneratedGroup, scores: Scores, *, attempt: int, worker: str, timings: Timings) -> RolloutGroup:
    """The finished group. Token ids as int32, log-probabilities as float32, all completions back to back.

    Raises:
        BadGroupError: tokens, log-probabilities or rewards are no numbers.
    """
    try:
        prompt_ids = [np.asarray(ids, dtype=np.int32) for ids in group.prompt_ids]
        one_prompt = all(np.array_equal(ids, prompt_ids[0]) for ids in prompt_ids[1:])
        completion_ids = _flat(group.completion_ids, np.int32)
        versions = _flat((tokens.versions for tokens in group.tokens), np.int32)
        kept = [*chain.from_iterable(tokens.kept for tokens in group.tokens)]
        return RolloutGroup(
            job=group.job,
            attempt=attempt,
            worker=worker,
            policy_version=group.version,
            reward_names=tuple(scores.names),
            prompt_ids=prompt_ids[0] if one_prompt else np.concatenate(prompt_ids),
            prompt_lengths=None if one_prompt else np.fromiter(map(len, prompt_ids), np.int32),
            completion_lengths=np.fromiter(map(len, group.completion_ids), np.int32),
            completion_ids=completion_ids,
            sampling_logprobs=_flat((tokens.logprobs for tokens in group.tokens), np.float32),
            tool_mask=_flat((tokens.mask for tokens in group.tokens), np.uint8) if group.has_masks else None,
            kept_tokens=pack(kept, completion_ids) if any(kept) else None,
            token_versions=None if (versions == NO_VERSION).all() else versions,
            rewards=scores.rewards.numpy().astype(np.float32),
            completions=encoded(group.completions),
            metrics=_joined(group.metrics, scores.metrics),
            added_metrics=_joined(group.added, scores.added),
            extra_columns=encoded(scores.extra_columns),
            prompts=encoded(_prompts_to_store(group)),
            timings=timings,
            **scores.columns,
        )
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # of a `rollout_func`, a reward or a tool
        raise BadGroupError(f"Group {group.job.seq} cannot be written: {error}") from error


def _prompts_to_store(group: GeneratedGroup) -> list[Any]:
    """As `RolloutGroup.prompts` has them: none where they are the row's own, one where all are equal."""
    first = group.prompts[0]
    if any(prompt != first for prompt in group.prompts):
        return group.prompts
    row = group.rows[0]
    return [] if "prompt" in row and first == prompt_of(row) else [first]


def _joined(some: dict[str, list[float]], others: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [*some.get(name, []), *others.get(name, [])] for name in some | others}


def _flat(rows: Iterable[Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=dtype)
