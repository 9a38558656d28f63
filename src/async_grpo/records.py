"""The vocabulary: what travels between the parameter server and the rollout workers.

A `Job` is one prompt group to generate. A `RolloutGroup` is that group, generated and scored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # numpy costs a tenth of a second that `--help` and `status` need not pay
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """Identifies a rollout worker. `str()` of it is the worker's name in file names and records, e.g. `dev1`."""

    PATTERN: ClassVar[str] = "dev(?:0|[1-9][0-9]{0,3})"  # a regular expression that matches every name

    number: int  # as the command line gives it

    def __str__(self) -> str:
        return f"dev{self.number}"

    @classmethod
    def parse(cls, name: str) -> WorkerId | None:
        """The worker of this name, or None if no worker can have it."""
        return cls(int(name[3:])) if re.fullmatch(cls.PATTERN, name) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt group to generate and score, e.g. `Job(run_id="5f0c…", seq=42, row={"prompt": "2+2="}, …)`."""

    run_id: str  # the run that issued it; files of another run are refused
    seq: int  # position in the order of submission, from 0; names the job
    row: dict[str, Any]  # the dataset row, JSON values only
    num_generations: int  # G, completions to sample for the prompt
    seed: int  # seeds the sampling of this group
    born_version: int  # the trainer's version when the job was submitted
    min_version: int  # the oldest policy version that may generate it


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of its worker's time that a group took: a batch's time is shared out evenly over its groups.

    Durations, never wall-clock times. Summed over groups they are the time for which the workers were busy.
    """

    adopt_s: float = 0.0  # adopting the newest weights
    generate_s: float = 0.0  # sampling
    score_s: float = 0.0  # the reward functions
    queue_s: float = 0.0  # claiming jobs, and handing back the group before this one


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """One prompt group, generated and scored. G completions, F reward functions.

    The completions of a group are stored back to back; `completion_lengths` says where each ends.
    """

    job: Job
    attempt: int  # 0 for the first try
    worker: str  # who generated it, e.g. "dev1"
    policy_version: int  # version of the weights that sampled its tokens; the oldest, where `token_versions` has more
    reward_names: tuple[str, ...]  # [F]
    prompt_ids: NDArray[np.int32]  # [P]
    completion_lengths: NDArray[np.int32]  # [G]
    completion_ids: NDArray[np.int32]  # [sum of lengths]
    sampling_logprobs: NDArray[np.float32]  # [sum of lengths], natural log, at the sampling temperature
    tool_mask: NDArray[np.uint8] | None  # [sum of lengths], 0 = token of a tool or an environment
    rewards: NDArray[np.float32]  # [G, F], NaN where a function returned None
    completions: list[Any]  # [G], text or messages, as TRL hands them to reward functions
    metrics: dict[str, list[float]] = field(default_factory=dict)  # `log_metric` of the reward functions
    extra_columns: dict[str, list[Any]] = field(default_factory=dict)  # `log_extra` of the reward functions
    timings: Timings = field(default_factory=Timings)
    token_versions: NDArray[np.int32] | None = None  # [sum of lengths], with `--in-flight-update on`
