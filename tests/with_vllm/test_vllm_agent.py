"""An agent that asks the worker's endpoint, answered by the real vLLM: recorded is what was sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from worker_on_vllm import GROUPS, served

from async_grpo.envs import Endpoint, OpenAIHarness
from kit.agents import said
from kit.engines import logprobs_of
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer, chat_rows, length

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
