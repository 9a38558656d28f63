"""Jobs and finished groups, of the few fields that a test is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from async_grpo.records import Job, RolloutGroup

RUN = "run-1"


def make_job(seq: int, num_generations: int = 2, **changes: Any) -> Job:
    """A job of version 0, whose prompt has its number."""
    fields: dict[str, Any] = {"run_id": RUN, "row": {"n": seq, "prompt": f"{seq}+{seq}="}, "seed": seq}
    fields |= {"born_version": 0, "min_version": 0, **changes}
    return Job(seq=seq, num_generations=num_generations, **fields)


def make_group(job: Job, version: int = 0, **changes: Any) -> RolloutGroup:
    """A group of completions of one token each, the first attempt of worker 1."""
    count = job.num_generations
    fields: dict[str, Any] = {
        "attempt": 0,
        "worker": "dev1",
        "policy_version": version,
        "reward_names": ("right",),
        "prompt_ids": np.array([1], np.int32),
        "completion_lengths": np.ones(count, np.int32),
        "completion_ids": np.full(count, 2, np.int32),
        "sampling_logprobs": np.full(count, -0.5, np.float32),
        "rewards": np.zeros((count, 1), np.float32),
        "completions": ["x"] * count,
    }
    return RolloutGroup(job=job, **{**fields, **changes})


def values_of(groups: Iterable[RolloutGroup], field: str) -> list[Any]:
    """What the completions of the groups have, token by token."""
    return [value for group in groups for value in getattr(group, field).tolist()]
