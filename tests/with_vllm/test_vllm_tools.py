"""TRL's tool loop, environments and agents on the real vLLM: recorded is what was sampled on the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer
from worker_on_vllm import GROUP_SIZE, GROUPS, ROW, served

from async_grpo.envs import Endpoint, OpenAIHarness
from kit.agents import said
from kit.engines import logprobs_of
from kit.learnt_by_heart import learn, played
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer, chat_rows, length
from kit.tools import TOOL_CALL, multiply


class Calculator:
    """An environment whose method is the tool."""

    def reset(self, **row: Any) -> str:
        self.calls = 0
        return ""

    def multiply(self, a: int, b: int) -> int:
        self.calls += 1
        return a * b

    def get_reward(self) -> float:
        return float(self.calls)


Calculator.multiply.__doc__ = multiply.__doc__
GIVEN = {"tools": {"tools": [multiply]}, "environments": {"environment_factory": Calculator}}


def says_done(completions: list[Any], **_: Any) -> list[float]:
    return [float(completion[-1]["content"] == "done") for completion in completions]


def built(given: str, folder: Path) -> GRPOTrainer:
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    return build_trainer(
        folder / "out",
        model=build_model(tokenizer, hidden_size=64, head_dim=32, intermediate_size=192),
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=chat_rows(),
        reward_funcs=[says_done],
        arguments=dict(GIVEN[given]),
        max_completion_length=300,
        generation_kwargs={"do_sample": False},
    )


@pytest.fixture(params=GIVEN)
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> GRPOTrainer:
    trainer = built(request.param, tmp_path)
    learn(trainer.model, played(built(request.param, tmp_path), [TOOL_CALL, "done"], ROW, GROUP_SIZE))
    return trainer


def test_tools_are_called_between_two_turns_on_the_engine(trainer: Any, tmp_path: Path) -> None:
    groups = served(trainer, tmp_path / "run")
    assert len(groups) == GROUPS
    for group in groups:
        assert group.rewards.tolist() == [[1.0] * len(group.reward_names)] * GROUP_SIZE
        for completion in group.completions:
            assert [message["role"] for message in completion] == ["assistant", "tool", "assistant"]
            assert completion[1]["content"] == "12"
        assert group.tool_mask is not None
        assert 0 < group.tool_mask.sum() < len(group.tool_mask), "what the tool wrote is not the model's"


# --- An agent that asks the worker's endpoint --------------------------------------------------------------------


FIRST = 6  # tokens of the first answer


def two_turns(prompt: list[Any], endpoint: Endpoint) -> None:
    first = said(endpoint, prompt, max_tokens=FIRST, temperature=1.0)
    said(endpoint, [*prompt, first, {"role": "user", "content": "And now?"}], max_tokens=FIRST)


def test_the_turns_of_an_agent_on_the_engine(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    trainer: Any = build_trainer(
        tmp_path / "out",
        model=build_model(tokenizer, hidden_size=64, head_dim=32, intermediate_size=192),
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=chat_rows(),
        reward_funcs=[length],
        arguments={"rollout_func": OpenAIHarness(two_turns)},
        max_completion_length=100,
    )
    groups = served(trainer, tmp_path / "run")
    assert len(groups) == GROUPS
    for group in groups:
        assert group.metrics == {"agent/turns": [2.0], "agent/failure_frequency": [0.0]}
        assert group.tool_mask is not None
        start = 0
        for size in group.completion_lengths.tolist():
            part = slice(start, start := start + size)
            computed = logprobs_of(trainer.model, group.prompt_ids.tolist(), group.completion_ids[part].tolist())
            own = torch.tensor(group.tool_mask[part]).bool()
            assert 0 < own.sum() < size
            recorded = torch.tensor(group.sampling_logprobs[part])
            assert torch.allclose(recorded[own], computed[own], atol=0.02)
