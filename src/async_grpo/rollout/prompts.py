"""A group's dataset rows and prompts as TRL has them when it generates: with PIL images, in their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl.data_utils import prepare_multimodal_messages

from async_grpo.errors import UnsupportedError
from async_grpo.images import opened
from async_grpo.records import OWN_SAMPLING

if TYPE_CHECKING:
    from async_grpo.records import Job
    from async_grpo.rollout.engines import Fields


def rows_of(job: Job) -> list[dict[str, Any]]:
    """The job's row, once per completion. `UnsupportedError`: an image cannot be read."""
    row = opened(job.row)
    return [dict(row) for _ in range(job.num_generations)]


def rows_of_jobs(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Each job's row, once per completion."""
    return [row for job in jobs for row in rows_of(job)]


def merge_extra_fields(rows: list[dict[str, Any]], fields: dict[str, Any] | None) -> None:
    """Put the other fields that `rollout_func` returned into the rows for the reward functions, as TRL does."""
    for name, values in (fields or {}).items():
        for index, row in enumerate(rows):
            if not isinstance(values, list):
                row[name] = values
            elif index < len(values):
                row[name] = values[index]


def refuse_unknown_sampling(jobs: Sequence[Job]) -> None:
    for job in jobs:
        if unknown := sorted(job.sampling.keys() - set(OWN_SAMPLING)):
            raise UnsupportedError(
                f"Job {job.seq} sets {', '.join(unknown)}. A job may set {', '.join(OWN_SAMPLING)} and nothing else."
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
    return {name: value if _is_per_token(value) else torch.as_tensor(np.array(value)) for name, value in fields.items()}


def _is_per_token(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def refuse_written_images(config: Any, completions: Sequence[list[int]], masks: Sequence[list[int]] | None) -> None:
    """Raise `UnsupportedError` where the model itself wrote a token that stands for an image.

    The trainer's forward pass finds more such tokens than images then, and TRL ends with an error.

    Args:
        masks: 0 where a tool or an environment wrote.
    """
    marks = {getattr(config, name, None) for name in ("image_token_id", "video_token_id")} - {None}
    for place, ids in enumerate(completions):
        own = ids if masks is None else [token for token, mask in zip(ids, masks[place], strict=True) if mask]
        if not marks.isdisjoint(own):
            raise UnsupportedError(
                "The model wrote a token that stands for an image, and there is none for it to train with. A trained "
                "model hardly ever does so; if many groups fail with this, check the model and its chat template."
            )
