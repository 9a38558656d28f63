"""An agent written against OpenAI's API, in the place of TRL's `rollout_func`: its worker answers what it asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from async_grpo.errors import UnsupportedError, UsageError

Columns = Mapping[str, Any] | None
"""What an agent returns: columns of its completion for the reward functions, or nothing."""

Agent = Callable[[Any, "Endpoint"], Columns | Awaitable[Columns]]
"""Called once a completion, with the row's prompt and where to ask. An async one is awaited; any other has a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an agent asks for tokens, in one episode.

    `AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)` connects to it, by TCP on this machine.
    """

    base_url: str  # http://127.0.0.1:PORT/v1
    api_key: str = field(repr=False)  # of this episode alone: a request is attributed by it
    model: str  # the only one that may be asked for

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the `openai` package reads, for a harness that is a process of its own."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}


class OpenAIHarness:
    """`GRPOTrainer(rollout_func=OpenAIHarness(agent), …)`: what the agent has the model say becomes its completion.

    Args:
        agent: `async def agent(prompt, endpoint)`, or a function without `async`, of which several run at a time.
        model: the name by which the agent asks for the policy.
    """

    def __init__(self, agent: Agent, *, model: str = "policy") -> None:
        if not callable(agent):
            raise UsageError(f"OpenAIHarness takes a function agent(prompt, endpoint), got {type(agent).__name__}.")
        self.agent = agent
        self.model = model

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Where TRL itself generates."""
        raise UnsupportedError(
            "OpenAIHarness needs a worker, whose engine answers the agent's requests: train with --distributed, and "
            f"without an override of the trainer's generation ({type(trainer).__name__})."
        )


def check_agent(trainer: Any) -> None:
    """Raise `UnsupportedError`, before anything is started, where an agent would be called in the server."""
    strategy = trainer.args.eval_strategy.value
    if isinstance(trainer.rollout_func, OpenAIHarness) and strategy != "no":
        raise UnsupportedError(
            f"OpenAIHarness and eval_strategy={strategy!r}: TRL's own evaluation generates in the server, and only a "
            "worker's engine answers an agent. Set eval_strategy='no'; --eval-every evaluates in the workers."
        )
