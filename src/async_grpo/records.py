"""The records that travel between the parameter server and the rollout workers, and how a queue file holds them.

A `Job` is one prompt group to generate. A `RolloutGroup` is that group, generated and scored. Each field declares once
how it is stored; `queue/schema.py` derives reading, writing and checking from that, and `scripts/record_format.py` the
tables in docs/queue.md. A new field names the format that introduces it (`since`) and has a default, which is its value
in older files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args

if TYPE_CHECKING:  # numpy costs a tenth of a second that `--help` and `status` need not pay
    import numpy as np
    from numpy.typing import NDArray

FORMAT = 2  # of the queue files that this version writes
OLDEST_FORMAT = 1  # that it reads

T = TypeVar("T")
Purpose = Literal["train", "eval", "generate"]
OWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "eta")  # settings that a job may bring
DIVERGENCE = "guidance/kl"  # in `RolloutGroup.metrics`: nats of each completion from the model's own distribution


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
class Stored:
    """How a queue file holds a field."""

    section: Literal["header", "texts", "tensor"]  # `texts`: JSON too, but outside the header, where it is not escaped
    kind: str | type  # dtype of a tensor; else a kind of JSON value (see `queue/schema.py`) or a nested record
    meaning: str
    shape: tuple[str, ...] = ()  # of a tensor, see `RolloutGroup`
    least: int | None = None
    most: int | None = None
    finite: bool = True  # of a floating-point tensor: NaN and infinity are refused
    choices: tuple[str, ...] = ()
    item: str = ""  # what an entry of free JSON is called in an error; JSON must hold such entries exactly
    since: int = OLDEST_FORMAT


def header(kind: str | type, meaning: str, **details: Any) -> Any:
    """A field in the JSON header."""
    return _stored(section="header", kind=kind, meaning=meaning, **details)


def texts(kind: str, meaning: str, **details: Any) -> Any:
    """A field with long texts."""
    return _stored(section="texts", kind=kind, meaning=meaning, **details)


def tensor(dtype: str, shape: str, meaning: str, **details: Any) -> Any:
    """An array with these dimensions, e.g. "G F". It may be absent if its default is None."""
    return _stored(section="tensor", kind=dtype, shape=tuple(shape.split()), meaning=meaning, **details)


def _stored(*, default: Any = MISSING, default_factory: Any = MISSING, **details: Any) -> Any:
    return field(default=default, default_factory=default_factory, metadata={"stored": Stored(**details)})


def distinct(names: Iterable[str]) -> list[str]:
    """Names as they are shown, each for one thing: a second `reward` becomes `reward (2)`."""
    found: dict[str, int] = {}  # how many had the name
    for name in names:
        shown = name
        while shown in found:
            found[name] += 1
            shown = f"{name} ({found[name]})"
        found[shown] = 1
    return [*found]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(header, texts, tensor))
def record(cls: type[T]) -> type[T]:
    """Make a frozen dataclass of a class whose fields are declared with `header`, `texts` and `tensor`."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@record
class Job:
    """One prompt group to generate and score, e.g. `Job(run_id="5f0c…", seq=42, row={"prompt": "2+2="}, …)`."""

    run_id: str = header("text", "the run that issued it; files of another run are refused")
    seq: int = header("integer", "position in the order of submission; names the job", least=0)
    row: dict[str, Any] = header("object", "the dataset row", item="dataset column")
    num_generations: int = header("integer", "G, completions to sample for the prompt", least=1)
    seed: int = header("integer", "seeds the sampling of this group")
    born_version: int = header("integer", "the trainer's version when the job was submitted")
    min_version: int = header("integer", "the oldest policy version that may generate it")
    purpose: Purpose = header(
        "text", "only groups for `train` reach the trainer", choices=get_args(Purpose), default="train"
    )
    sampling: dict[str, Any] = header(
        "object",
        "`temperature` (0: greedy), `top_p`, `top_k` (0: off), `min_p`, `max_tokens`, `eta` (strength of guidance, or "
        "`off`); the trainer's for those that are absent",
        item="sampling setting",
        default_factory=dict,
    )
    task: str = header("text", "name of the task that the prompt belongs to", default="")
    trainer_state: dict[str, Any] = header(
        "object",
        "what reward functions see as `trainer_state`: the trainer's when the job was submitted",
        item="field of the trainer's state",
        default_factory=dict,
    )
    prefix_ids: tuple[int, ...] = header(
        "list of tokens",
        "tokens that each completion begins with; `max_tokens` counts those that are sampled after them",
        default=(),
        since=2,
    )


@record
class Timings:
    """Seconds of its worker's time that a group took: a batch's time is shared out evenly over its groups.

    Durations, never wall-clock times. Summed over groups they are the time for which the workers were busy.
    """

    adopt_s: float = header("number", "adopting the newest weights", default=0.0)
    generate_s: float = header("number", "sampling", default=0.0)
    score_s: float = header("number", "the reward functions", default=0.0)
    queue_s: float = header("number", "claiming jobs, and handing back the group before this one", default=0.0)


@record
class RolloutGroup:
    """One prompt group, generated and scored.

    Dimensions: P tokens of the prompt, G completions, N tokens of all completions, F reward functions, T turns of all
    completions, K bytes. The completions of a group are stored back to back; `completion_lengths` [G] says where each
    ends. So are their prompts where they differ (an environment or a `rollout_func` made them), by `prompt_lengths`.
    """

    job: Job = header(Job, "the job as it was claimed")
    attempt: int = header("integer", "0 for the first try")
    worker: str = header("text", "the worker that generated it, e.g. dev1")
    policy_version: int = header("integer", "version of the weights that sampled it; the oldest of `token_versions`")
    reward_names: tuple[str, ...] = header("list of text", "names of the F reward functions")
    metrics: dict[str, list[float]] = header(
        "object of lists of numbers", "`log_metric` of the reward functions", default_factory=dict
    )
    added_metrics: dict[str, list[float]] = header(
        "object of lists of numbers",
        "what rewards, tools and overrides added to `_metrics` of the trainer, by `MODE/NAME`",
        default_factory=dict,
    )
    timings: Timings = header(Timings, "seconds of the worker's time", default_factory=Timings)
    node: str = header("text", "the machine that generated it", default="")

    prompt_ids: NDArray[np.int32] = tensor(
        "int32", "P", "tokens of the prompt; with `prompt_lengths`, of the G prompts, back to back", least=0
    )
    prompt_lengths: NDArray[np.int32] | None = tensor(
        "int32", "G", "tokens of each completion's prompt; absent where all have one", least=0, default=None
    )
    completion_lengths: NDArray[np.int32] = tensor("int32", "G", "tokens of each completion", least=0)
    completion_ids: NDArray[np.int32] = tensor("int32", "N", "tokens of the completions", least=0)
    sampling_logprobs: NDArray[np.float32] = tensor(
        "float32", "N", "natural log of each token's probability, at the sampling temperature"
    )
    rewards: NDArray[np.float32] = tensor(
        "float32", "G F", "as the functions returned them; NaN for None", finite=False
    )
    turn_counts: NDArray[np.int32] | None = tensor("int32", "G", "turns of each completion", least=0, default=None)
    turn_rewards: NDArray[np.float32] | None = tensor(
        "float32", "T", "one a turn, completion after completion; NaN: none", finite=False, default=None
    )
    token_versions: NDArray[np.int32] | None = tensor(
        "int32", "N", "version that sampled each token, with `--in-flight-update on`", default=None
    )
    tool_mask: NDArray[np.uint8] | None = tensor(
        "uint8",
        "N",
        "0 for tokens of a tool, of an environment or of the job's `prefix_ids`",
        least=0,
        most=1,
        default=None,
    )
    kept_tokens: NDArray[np.uint8] | None = tensor(
        "uint8",
        "K",
        "the tokens that truncated sampling kept for each token, where the loss is computed over them: a zstandard "
        "frame, see `tokens/kept_tokens.py`",
        default=None,
    )

    completions: list[Any] = texts(
        "list", "G texts or lists of messages, as reward functions get them", item="completion"
    )
    extra_columns: dict[str, list[Any]] = texts(
        "object of lists", "`log_extra` of the reward functions", item="log_extra column", default_factory=dict
    )
    prompts: list[Any] = texts(
        "list",
        "the G prompts with what an environment added, as texts or messages; one: all are equal; none: the row's",
        item="prompt",
        default_factory=list,
    )

    def prompt(self, index: int) -> Any:
        """What completion `index` answers, text or messages; the whole row where it names no prompt."""
        own = self.prompts or [self.job.row.get("prompt", self.job.row)]
        return own[index % len(own)]

    def masks(self) -> list[list[int]]:
        """Masks of each completion: 1 for what the model wrote."""
        mask = [1] * len(self.completion_ids) if self.tool_mask is None else self.tool_mask.tolist()
        ends = self.completion_lengths.cumsum().tolist()
        return [mask[end - length : end] for end, length in zip(ends, self.completion_lengths.tolist(), strict=True)]

    def rewards_of_turns(self) -> list[list[float]]:
        """One reward a turn of each completion, NaN for none; empty where the group has none."""
        if self.turn_counts is None or self.turn_rewards is None:
            return [[] for _ in range(self.job.num_generations)]
        ends = self.turn_counts.cumsum().tolist()
        values = self.turn_rewards.tolist()
        return [values[end - count : end] for end, count in zip(ends, self.turn_counts.tolist(), strict=True)]


def seed_from(text: str) -> int:
    """A seed that anybody who knows the text can compute again; 63 bits, which torch takes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
