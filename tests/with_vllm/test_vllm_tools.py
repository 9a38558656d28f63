"""TRL's tool loop and environments on the real vLLM: a model calls a tool, gets its answer, and continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from in_process import (
    QWEN3_CHAT_TEMPLATE,
    InProcessWorker,
    ScriptedEngine,
    ScriptedGenerator,
    build_model,
    build_tokenizer,
    build_trainer,
    chat_rows,
    jobs_of,
)
from trl import GRPOTrainer

from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.records import Job, RolloutGroup
from async_grpo.rollout.engines import PreparedGroup, SampledGroup
from async_grpo.rollout.engines.continuous import ContinuousEngine
from async_grpo.rollout.engines.vllm import VLLMEngine
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.rollout.worker import Worker, WorkerContext
from async_grpo.settings import WorkerSettings

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
ROW = {"prompt": [{"role": "user", "content": "3*4?"}]}
GROUPS, GROUP_SIZE = 3, 2
ENOUGH = 0.02  # mean loss at which greedy decoding repeats what was learnt


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


class Scripted(ScriptedEngine):
    """Answers with a call, then with "done", and keeps what it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        answers = iter([CALL, "done"])
        answer = [""]

        def reply(prompt: str, place: int) -> str:
            if place == 0:
                answer[0] = next(answers)
            return answer[0]

        super().__init__(ScriptedGenerator(tokenizer, reply))
        self.turns: list[tuple[list[int], list[int]]] = []

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        sampled = super().sample(new)
        self.turns += [(turn.prepared.prompt_ids[0], turn.token_ids[0]) for turn in sampled]
        return sampled


def teach(model: Any, turns: list[tuple[list[int], list[int]]]) -> None:
    """Have the model learn by heart what to say in these turns, of which the last one's prompt has the others."""
    prompt, answer = turns[-1]
    ids = torch.tensor([prompt + answer])
    labels = torch.full_like(ids, -100)
    for asked, said in turns:
        labels[0, len(asked) : len(asked) + len(said)] = torch.tensor(said)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(input_ids=ids, labels=labels).loss
        if loss.item() < ENOUGH:
            return
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    pytest.fail(f"the model did not learn its two answers: loss {loss.item():.3f}")


class OwnWeights:
    """The trainer's weights, as a worker leases them."""

    generation, version = "one", 0

    def __init__(self, model: Any) -> None:
        self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}

    @contextmanager
    def lease(self) -> Iterator[Any]:
        yield SimpleNamespace(items=self._tensors.items, version=0, generation="one")


class UntilDone:
    """The stop request of a worker that ends once this many groups have come back."""

    def __init__(self, server: ServerQueue) -> None:
        self._server = server

    @property
    def requested(self) -> bool:
        return len(self._server.finished()) == GROUPS


@pytest.fixture(params=GIVEN)
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> GRPOTrainer:
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    trainer: Any = build_trainer(
        tmp_path / "out",
        model=build_model(tokenizer, hidden_size=64, head_dim=32, intermediate_size=192),
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=chat_rows(),
        reward_funcs=[says_done],
        arguments=dict(GIVEN[request.param]),
        max_completion_length=300,
        generation_kwargs={"do_sample": False},
    )
    scripted = Scripted(tokenizer)
    InProcessWorker(trainer, scripted).generate(jobs_of([ROW], GROUP_SIZE))
    trainer.model.train()
    teach(trainer.model, scripted.turns)
    trainer.model.eval()
    trainer.model.training = True  # TRL reads it as "this is a training batch"
    return trainer


def served(trainer: Any, folder: Path) -> list[RolloutGroup]:
    folder.mkdir(mode=0o700)
    server, queue = ServerQueue.open(folder, "run"), WorkerQueue.open(folder, 1, "cpu")
    for seq in range(GROUPS):
        server.submit(
            Job(run_id="run", seq=seq, row=ROW, num_generations=GROUP_SIZE, seed=seq, born_version=0, min_version=0)
        )
    engine = VLLMEngine(trainer, seed=0)
    context = WorkerContext(
        trl=RolloutTrainer(trainer),
        queue=queue,
        weights=OwnWeights(trainer.model),  # type: ignore[arg-type]
        run=SimpleNamespace(root=folder, read_state=lambda: SimpleNamespace(state="running")),  # type: ignore[arg-type]
        stop=UntilDone(server),  # type: ignore[arg-type]
        settings=WorkerSettings(),
        deterministic=False,
    )
    try:
        Worker(context, ContinuousEngine(engine, group_size=GROUP_SIZE)).run()
    finally:
        engine.close()
    groups = [server.take(entry) for entry in server.finished()]
    return [group for group in groups if group is not None]


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
