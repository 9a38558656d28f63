"""The engines that sample tokens: transformers, vLLM within the worker, vLLM servers (`served`); all are an `Engine`.

What surrounds sampling (claims, prompts, rewards) is in `async_grpo.rollout`. Private names of vLLM live in `vllm` and
`vllm_*`. `rollout.engine_choice` makes the engine of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from async_grpo.errors import PeerDiedError
from async_grpo.records import seed_from

if TYPE_CHECKING:
    from async_grpo.engines.policy import Policy
    from async_grpo.records import Job
    from async_grpo.setup.generator_choice import Capabilities
    from async_grpo.tokens import Tokens
    from async_grpo_ipc import RemoteWeights


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedGroup:
    """The prompts of one group, as token ids, and what the model computes their images from."""

    job: Job
    version: int  # policy version that samples it, or begins to where weights change meanwhile
    prompt_ids: list[list[int]]  # [G]
    row: dict[str, Any] = field(default_factory=dict)  # the job's, and its prompt, as TRL has them: with PIL images
    prompt: Any = None
    images: list[list[Any] | None] | None = None  # [G], as PIL has them; None: no prompt has any
    fields: Sequence[Fields] = ()  # of neighbouring prompts together; the same object: equal prompts
    turn: int = 0  # of several in which the same job asks for tokens
    first_index: int = 0  # of its first prompt among the job's completions

    @property
    def seed(self) -> int:
        """Seed of this turn: the job's own for the first."""
        return self.seed_of("") if self.turn else self.job.seed

    def seed_of(self, index: int | str) -> int:
        """Seed of one completion, the same for every worker that samples the job."""
        position = self.first_index + index if isinstance(index, int) else index
        return seed_from(f"{self.job.seed}:{self.turn}:{position}")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampledGroup:
    """The completions that an engine sampled for a prepared group, or the error that it ended with."""

    prepared: PreparedGroup
    tokens: list[Tokens] = field(default_factory=list)  # [G], the end token included
    divergences: list[float] = field(default_factory=list)  # [G], nats from the reference; none where not guided
    error: BaseException | None = None


@dataclass(slots=True)
class Chunk:
    """New tokens of one request, in the order of sampling, as an engine with continuous batching gives them."""

    request_id: str
    tokens: Tokens
    finished: bool


Fields = Mapping[str, Any]
"""What a processor of TRL returns besides token ids (`pixel_values`, `mm_token_type_ids`, …), of some prompts: tensors,
or one list a prompt with a number for each of its tokens."""


class WeightsLostError(PeerDiedError):
    """The exporter died while its weights were copied under the groups in flight: what they sample is of no version."""


def stop_tags(trainer: Any) -> tuple[str, ...]:
    """What ends a message in a dialogue with tools: the tags of a tokenizer from `async_grpo.envs.with_tags`."""
    return tuple(getattr(trainer.processing_class, "stop_tags", ())) if trainer.tools else ()


class Engine(Protocol):
    """Samples completions. Every method is called by the worker's thread."""

    capabilities: Capabilities

    @property
    def most_groups(self) -> int:
        """How many groups it samples together at most."""
        ...

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        """Take in the groups `new`, sample one more token of all groups, and return the groups that have ended.

        An error that belongs to a group ends that group alone. Only sampling counts as progress of the process, so
        that `--worker-timeout` ends a worker whose tools hang.

        Raises:
            GeneratorError: the engine is broken; no group is to blame.
        """
        ...

    def follow(self, weights: RemoteWeights) -> Policy:
        """How this engine adopts new versions of `weights`."""
        ...

    def close(self) -> None:
        """Drop the groups that are being sampled. It can be used again."""
        ...

    def end(self) -> None:
        """End what it started outside of this process. It is not used again."""
        ...
