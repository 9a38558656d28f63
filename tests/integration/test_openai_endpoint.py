"""An agent that asks a worker's endpoint: what it has the model say is recorded as it was sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.envs import Endpoint
from kit.agents import agent_trainer, agent_worker, numbers_its_turns, said
from kit.engines import logprobs_of
from kit.in_process import InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, Streaming
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_tokenizer, chat_rows
from kit.tools import written

pytestmark = pytest.mark.integration
engines = pytest.mark.parametrize("engine_of", [ScriptedEngine, Streaming], ids=["lockstep", "streaming"])
DOUBLE = {
    "type": "function",
    "function": {
        "name": "double",
        "description": "Double a number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


def two_turns(prompt: list[Any], endpoint: Endpoint) -> dict[str, Any]:
    first = said(endpoint, prompt)
    second = said(endpoint, [*prompt, first, {"role": "user", "content": "And now?"}])
    return {"final": second["content"]}


@engines
def test_turns_of_an_agent_are_one_completion(engine_of: Any, tmp_path: Path) -> None:
    worker = agent_worker(tmp_path, two_turns, engine_of, numbers_its_turns)
    [group] = worker.generate(jobs_of(chat_rows(1)))
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    between = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    for tokens, messages in zip(group.tokens, group.completions, strict=True):
        ids, mask, logprobs = tokens.ids, tokens.mask, tokens.logprobs
        first, second = (message["content"] for message in messages if message["role"] == "assistant")
        assert tokenizer.decode(ids) == f"{first}<|im_end|>{between}{second}<|im_end|>"
        turns = [len(first) + 1, len(tokenizer(between)["input_ids"]), len(second) + 1]
        assert mask == [1] * turns[0] + [0] * turns[1] + [1] * turns[2]
        assert [value == 0 for value in logprobs] == [not own for own in mask]
        assert [message["role"] for message in messages] == ["assistant", "user", "assistant"]
    assert tokenizer.decode(group.prompt_ids[0]) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert [row["final"] for row in group.rows] == [messages[-1]["content"] for messages in group.completions]
    assert group.metrics == {"agent/turns": [2.0], "agent/failure_frequency": [0.0]}


def test_the_log_probabilities_are_those_of_the_trainer(tmp_path: Path) -> None:
    """With the model itself: what was recorded is what the model was given, token by token."""

    async def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        messages = list(prompt)
        for _ in range(2):
            answer = await asyncio.to_thread(said, endpoint, messages, max_tokens=6, temperature=1.0)
            messages += [answer, {"role": "user", "content": "go on"}]

    trainer = agent_trainer(tmp_path, agent, max_completion_length=64)
    worker = InProcessWorker(trainer)
    [group] = worker.generate(jobs_of(chat_rows(1)))
    assert group.metrics["agent/turns"] == [2.0]
    [again] = worker.generate(jobs_of(chat_rows(1)))
    assert again.tokens == group.tokens
    for prompt, tokens in zip(group.prompt_ids, group.tokens, strict=True):
        computed, own = logprobs_of(trainer.model, prompt, tokens.ids), torch.tensor(tokens.mask).bool()
        assert own.sum() == 12 < len(own)
        assert torch.allclose(torch.tensor(tokens.logprobs)[own], computed[own], atol=1e-4)


class NewWeightsEachTurn(Streaming):
    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        made = super().sample(new)
        for one in made:
            for tokens in one.tokens:
                tokens.versions = [4 + one.prepared.turn] * len(tokens)
                tokens.kept = [bytes(4 * (1 + one.prepared.turn))] * len(tokens)
        return made


def test_each_token_has_the_version_that_sampled_it_and_the_tokens_that_were_kept(tmp_path: Path) -> None:
    [group] = agent_worker(tmp_path, two_turns, NewWeightsEachTurn, numbers_its_turns).generate(
        jobs_of(chat_rows(1)), version=4
    )
    assert group.version == 4
    for tokens in group.tokens:
        versions, sets, mask = tokens.versions, tokens.kept, tokens.mask
        second = len(mask) - mask[::-1].index(0)  # where the last turn begins
        assert versions == [4] * second + [5] * (len(mask) - second)
        assert [len(each) > 0 for each in sets] == [value == 1 for value in mask]
        assert len(sets[0]) == 4 and len(sets[-1]) == 8


def test_tools_of_an_agent(tmp_path: Path) -> None:
    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        first = said(endpoint, prompt, tools=[DOUBLE])
        [call] = first["tool_calls"]
        number = json.loads(call["function"]["arguments"])["number"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": str(2 * number)}
        said(endpoint, [*prompt, first, result], tools=[DOUBLE])

    def reply(prompt: str, index: int) -> str:
        return "done" if "<tool_response>" in prompt else written(("double", {"number": 21}))

    [group] = agent_worker(tmp_path, agent, Streaming, reply).generate(jobs_of(chat_rows(1)))
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    assert "Double a number." in tokenizer.decode(group.prompt_ids[0])
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(group.completion_ids[0])
    call, result, last = group.completions[0]
    assert call["tool_calls"][0]["function"] == {"name": "double", "arguments": {"number": 21}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "double", "42")
    assert last["content"] == "done"
