"""TRL's tool loop and environments on the real vLLM: a model calls a tool, gets its answer, and continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from trl import GRPOTrainer
from worker_on_vllm import GROUP_SIZE, GROUPS, ROW, served

from kit.learnt_by_heart import learn, played
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer, chat_rows

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: one factor.
        b: the other.
    """
    return a * b


class Calculator:
    """An environment whose method is the tool."""

    def reset(self, **row: Any) -> str:
        self.calls = 0
        return ""

    def multiply(self, a: int, b: int) -> int:
        """Multiply.

        Args:
            a: one factor.
            b: the other.
        """
        self.calls += 1
        return a * b

    def get_reward(self) -> float:
        return float(self.calls)


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
    learn(trainer.model, played(built(request.param, tmp_path), [CALL, "done"], ROW, GROUP_SIZE))
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
