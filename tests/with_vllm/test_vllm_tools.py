"""TRL's tool loop, environments and agents on the real vLLM: recorded is what was sampled on the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from async_grpo.engines.continuous import ContinuousEngine
from async_grpo.engines.vllm import VLLMEngine
from async_grpo.envs import Endpoint, OpenAIHarness
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.records import RolloutGroup
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.rollout.worker import Worker, WorkerContext
from async_grpo.settings import WorkerSettings
from kit.agents import said
from kit.engines import logprobs_of
from kit.groups import RUN
from kit.in_process import jobs_of
from kit.learnt_by_heart import learn, played
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer, chat_rows, length
from kit.tools import TOOL_CALL, multiply

ROW = {"prompt": [{"role": "user", "content": "3*4?"}]}
GROUPS, GROUP_SIZE = 3, 2


class OwnWeights:
    """The trainer's weights, as a worker leases them."""

    version, newest = 0, ("one", 0)

    def __init__(self, model: Any) -> None:
        self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}

    @contextmanager
    def lease(self) -> Iterator[Any]:
        yield SimpleNamespace(items=self._tensors.items, version=0, generation="one")

    def intact(self, *, wait: bool) -> bool:
        return True

    def release(self) -> None:
        """Nothing is held between two leases."""


def served(trainer: Any, folder: Path) -> list[RolloutGroup]:
    folder.mkdir(mode=0o700)
    server, queue = ServerQueue.open(folder, RUN), WorkerQueue.open(folder, 1, "cpu")
    for job in jobs_of([ROW] * GROUPS, GROUP_SIZE):
        server.submit(job)
    engine = VLLMEngine(trainer, seed=0)
    context = WorkerContext(
        trl=RolloutTrainer(trainer),
        queue=queue,
        weights=OwnWeights(trainer.model),  # type: ignore[arg-type]
        run=SimpleNamespace(root=folder, read_state=lambda: SimpleNamespace(state="running")),  # type: ignore[arg-type]
        should_stop=lambda: len(server.finished()) == GROUPS,
        settings=WorkerSettings(),
        deterministic=False,
    )
    try:
        Worker(context, ContinuousEngine(engine, group_size=GROUP_SIZE)).run()
    finally:
        engine.close()
    groups = [server.take(entry) for entry in server.finished()]
    return [group for group in groups if group is not None]


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
