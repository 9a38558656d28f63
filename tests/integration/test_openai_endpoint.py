"""An agent that asks a worker's endpoint: what it has the model say is recorded as it was sampled, or refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import IntervalStrategy

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.envs import Endpoint, OpenAIHarness
from async_grpo.errors import GeneratorError, UnsupportedError
from async_grpo.rollout.endpoint.episode import Episode
from async_grpo.rollout.endpoint.harness import MOST_LEFT_BEHIND
from async_grpo.setup.openai_harness import check_agent
from kit.agents import Response, agent_trainer, agent_worker, numbers_its_turns, posted, said, sent
from kit.engines import logprobs_of
from kit.in_process import InProcessWorker, jobs_of
from kit.scripted import NewWeightsEachTurn, ScriptedEngine, Streaming, kept
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_tokenizer, chat_rows
from kit.tools import double, written
from kit.waiting import DEADLINE_S

engines = pytest.mark.parametrize("engine_of", [ScriptedEngine, Streaming], ids=["lockstep", "streaming"])
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
ABOUT = {"name": "double", "description": "Double a number.", "parameters": NUMBER}
DOUBLE = {"type": "function", "function": ABOUT}


def two_turns(prompt: list[Any], endpoint: Endpoint) -> dict[str, Any]:
    first = said(endpoint, prompt)
    second = said(endpoint, [*prompt, first, {"role": "user", "content": "And now?"}])
    return {"final": second["content"]}


@engines
def test_turns_of_an_agent_are_one_completion(engine_of: Any, tmp_path: Path) -> None:
    [group] = agent_worker(tmp_path, two_turns, engine_of, numbers_its_turns).generate(jobs_of(chat_rows(1)))
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


def test_each_token_has_the_version_that_sampled_it_and_the_tokens_that_were_kept(tmp_path: Path) -> None:
    worker = agent_worker(tmp_path, two_turns, NewWeightsEachTurn, numbers_its_turns)
    [group] = worker.generate(jobs_of(chat_rows(1)), version=4)
    assert group.version == 4
    for tokens in group.tokens:
        second = len(tokens) - tokens.mask[::-1].index(0)  # where the last turn begins
        assert tokens.versions == [4] * second + [5] * (len(tokens) - second)
        own = zip(tokens.ids, tokens.mask, strict=True)
        assert tokens.kept == [kept(token) if mask else b"" for token, mask in own]


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


# --- What agents cannot have, agents that end badly, and clients that come and go --------------------------------


NEXT = {"role": "user", "content": "And now?"}


def streaming(tmp_path: Path, agent: Any, reply: Any = numbers_its_turns, **changes: Any) -> InProcessWorker:
    return agent_worker(tmp_path, agent, Streaming, reply, **changes)


def one(worker: InProcessWorker) -> Any:
    [group] = worker.generate(jobs_of(chat_rows(1)))
    return group


def edited(prompt: list[Any], endpoint: Endpoint) -> None:
    first = said(endpoint, prompt)
    posted(endpoint, [*prompt, {**first, "content": first["content"] + " (shortened)"}, NEXT])


def twice(prompt: list[Any], endpoint: Endpoint) -> None:
    said(endpoint, prompt)
    posted(endpoint, prompt)


def other_tools(prompt: list[Any], endpoint: Endpoint) -> None:
    first = said(endpoint, prompt)
    posted(endpoint, [*prompt, first, NEXT], tools=[{"type": "function", "function": {"name": "new"}}])


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        (lambda prompt, endpoint: posted(endpoint, prompt, n=2), "n=2 is not supported"),
        (edited, r"message 1 \(assistant\) is not what it was"),
        (twice, "no message behind the last answer"),
        (other_tools, "its tools are others"),
    ],
)
def test_a_refused_request_fails_its_group_whatever_the_agent_does(agent: Any, sentence: str, tmp_path: Path) -> None:
    answers: list[Response] = []

    def looks(prompt: list[Any], endpoint: Endpoint) -> None:
        answers.append(agent(prompt, endpoint))

    with pytest.raises(UnsupportedError, match=f"refused a request of the agent: .*{sentence}"):
        one(streaming(tmp_path, looks))
    for answer in filter(None, answers):
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["message"]


def test_what_a_sibling_asks_later_is_answered_with_the_first_error(tmp_path: Path, warnings: list[str]) -> None:
    failed, answers, numbers = threading.Event(), [], itertools.count()
    asked = threading.Event()

    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        if next(numbers) == 0:
            posted(endpoint, prompt, n=2)
            return
        assert failed.wait(DEADLINE_S)
        answers.append(posted(endpoint, prompt))
        asked.set()

    with pytest.raises(UnsupportedError, match="n=2 is not supported"):
        one(streaming(tmp_path, agent))
    failed.set()
    assert asked.wait(DEADLINE_S)
    assert answers[0].status == 401 and "n=2 is not supported" in answers[0].json()["error"]["message"]
    assert [line for line in warnings if "of no episode that is open" in line] == []


def test_an_error_costs_its_group_alone(tmp_path: Path) -> None:
    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        posted(endpoint, prompt, **({"n": 2} if prompt[0]["content"] == "a" else {}))

    worker = streaming(tmp_path, agent)
    found = worker.ended(2, jobs_of(chat_rows(2)))
    assert isinstance(found[0].error, UnsupportedError)
    assert found[1].error is None


def test_requests_of_nobody(tmp_path: Path) -> None:
    """Without a key, with a wrong one, to another address, and once the episode is over."""
    answers: list[list[int]] = []
    keys: list[Endpoint] = []

    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        strangers = [sent(endpoint, {}, key) for key in (None, "", "wrong", endpoint.api_key[:-1])]
        elsewhere = sent(endpoint, {}, endpoint.api_key, path="/embeddings")
        answers.append([response.status for response in [*strangers, elsewhere]])
        keys.append(endpoint)
        said(endpoint, prompt)

    group = one(streaming(tmp_path, agent))
    assert answers == [[401, 401, 401, 401, 404]] * 2
    assert group.metrics["agent/turns"] == [1.0]
    late = posted(keys[0], [NEXT])
    assert late.status == 401 and late.json()["error"]["code"] == "invalid_api_key"
    assert len({endpoint.api_key for endpoint in keys}) == 2
    assert keys[0].api_key not in repr(keys[0])


@pytest.mark.parametrize(("size", "code"), [(20_000, "request_too_large"), (400, "context_length_exceeded")])
def test_a_long_request_ends_a_dialogue(size: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a dialogue of TRL's tool loop ends: the model has made it so long."""
    monkeypatch.setattr("async_grpo.rollout.endpoint.server.MOST_BYTES", 10_000)

    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        first = said(endpoint, prompt)
        response = posted(endpoint, [*prompt, first, {"role": "user", "content": "x" * size}])
        raise RuntimeError(response.json()["error"]["code"])

    group = one(streaming(tmp_path, agent))
    assert [sum(tokens.mask) for tokens in group.tokens] == [len(ids) for ids in group.completion_ids]
    assert [row["agent_error"] for row in group.rows] == [None, None]

    def asks_at_once(prompt: list[Any], endpoint: Endpoint) -> None:
        response = posted(endpoint, [{"role": "user", "content": "x" * max(size, 4000)}])
        raise RuntimeError(response.json()["error"]["code"])

    with pytest.raises(UnsupportedError, match=code if size > 400 else "The prompt is longer than"):
        one(streaming(tmp_path, asks_at_once))


def test_answers_are_cut_at_the_lengths_of_the_request_and_the_completion(tmp_path: Path) -> None:
    reasons: list[str] = []

    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        answer = posted(endpoint, prompt, max_tokens=4).json()["choices"][0]
        more = posted(endpoint, [*prompt, answer["message"], NEXT]).json()["choices"][0]
        reasons.extend([answer["message"]["content"], answer["finish_reason"], more["finish_reason"]])

    group = one(streaming(tmp_path, agent, max_completion_length=40))
    assert reasons == ["turn", "length", "length"] * 2
    assert [len(ids) for ids in group.completion_ids] == [40, 40]
    end = build_tokenizer().eos_token_id  # the template ends the message that was cut
    assert [ids[4] for ids in group.completion_ids] == [end, end]
    assert [tokens.mask[3:5] for tokens in group.tokens] == [[1, 0]] * 2


def raises(prompt: list[Any], endpoint: Endpoint) -> None:
    raise ValueError("broken")


def exits(prompt: list[Any], endpoint: Endpoint) -> None:
    raise SystemExit(3)


async def exits_later(prompt: list[Any], endpoint: Endpoint) -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        (lambda prompt, endpoint: None, "returned without an answer of the endpoint"),
        (raises, "ended .ValueError: broken. without an answer"),
        (exits, "SystemExit: 3"),
        (exits_later, "SystemExit: 3"),
        (lambda prompt, endpoint: said(endpoint, prompt)["content"], "returned str. It must return None, or a dict"),
    ],
)
def test_an_agent_without_a_completion_fails_its_group(agent: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        one(streaming(tmp_path, agent))


def test_an_agent_that_raises_keeps_what_the_model_said(tmp_path: Path) -> None:
    def agent(prompt: list[Any], endpoint: Endpoint) -> dict[str, Any]:
        answer = said(endpoint, prompt)["content"]
        if answer.endswith("0"):
            raise KeyError(answer)
        return {"answer": answer}

    replies = iter(["turn 0", "turn 1"])
    group = one(streaming(tmp_path, agent, lambda prompt, index: next(replies)))
    errors = sorted((row["agent_error"] or "", row["answer"]) for row in group.rows)
    assert errors == [("", "turn 1"), ("KeyError: 'turn 0'", None)]
    assert group.metrics["agent/failure_frequency"] == [0.5]
    assert all(group.completion_ids)


@pytest.mark.parametrize("answers", [0, 1])
def test_a_connection_that_broke_is_not_taken_for_the_models_last_word(answers: int, tmp_path: Path) -> None:
    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        for _ in range(answers):
            said(endpoint, prompt)
        try:
            raise ConnectionResetError(104, "Connection reset by peer")
        except ConnectionError as error:
            raise RuntimeError("the agent failed") from error

    with pytest.raises(GeneratorError, match=r"connection to the endpoint broke \(RuntimeError.*tried again"):
        one(streaming(tmp_path, agent))


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set no agent's time is over, however slow the machine is; then that of each is."""
    hung = threading.Event()
    monkeypatch.setattr(Episode, "idle_s", property(lambda self: 60.0 if hung.is_set() else 0.0))
    return hung


@pytest.mark.parametrize("is_async", [False, True], ids=["thread", "async"])
def test_an_agent_that_hangs_is_given_up(is_async: bool, hung: threading.Event, tmp_path: Path) -> None:
    over, both_asked = threading.Event(), threading.Barrier(2, hung.set)

    def asks(prompt: list[Any], endpoint: Endpoint) -> None:
        said(endpoint, prompt)
        both_asked.wait(DEADLINE_S)

    def hangs(prompt: list[Any], endpoint: Endpoint) -> None:
        asks(prompt, endpoint)
        over.wait(DEADLINE_S)

    async def hangs_too(prompt: list[Any], endpoint: Endpoint) -> None:
        await asyncio.to_thread(asks, prompt, endpoint)
        await asyncio.sleep(DEADLINE_S)

    worker = streaming(tmp_path, hangs_too if is_async else hangs)
    worker.calls._harness._timeout_s = 0.05
    group = one(worker)
    assert all("did not return within 0.05 s (--tool-timeout)" in row["agent_error"] for row in group.rows)
    over.set()


def test_too_many_agents_that_hang_end_the_worker(hung: threading.Event, tmp_path: Path) -> None:
    over, all_called = threading.Event(), threading.Barrier(MOST_LEFT_BEHIND + 1, hung.set)

    def hangs(prompt: list[Any], endpoint: Endpoint) -> None:
        all_called.wait(DEADLINE_S)
        over.wait(DEADLINE_S)

    worker = streaming(tmp_path, hangs)
    worker.calls._harness._timeout_s = 0.05
    with pytest.raises(GeneratorError, match="calls of the agent still run"):
        worker.ended(1, jobs_of(chat_rows(1), group_size=MOST_LEFT_BEHIND + 1))
        worker.calls.step()
    over.set()


class Gated(Streaming):
    """Samples nothing until the test says so."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.goes_on = threading.Event()
        self._held: list[PreparedGroup] = []

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        self._held += new
        if not self.goes_on.is_set():
            time.sleep(0.005)
            return []
        held, self._held = self._held, []
        return super().sample(held)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_client_that_hangs_up(comes_back: bool, tmp_path: Path) -> None:
    """It gets the answer that was begun for it: a second sample would be one that was chosen by its length."""
    engines: list[Gated] = []
    answers: list[str] = []

    def gated(script: Any) -> Gated:
        engines.append(Gated(script))
        return engines[0]

    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        with pytest.raises(TimeoutError):
            sent(endpoint, {"model": endpoint.model, "messages": prompt}, endpoint.api_key, wait_s=0.2)
        if comes_back:
            threading.Timer(0.1, engines[0].goes_on.set).start()
            answers.append(said(endpoint, prompt)["content"])
            assert said(endpoint, [*prompt, {"role": "assistant", "content": answers[-1]}, NEXT])

    worker = agent_worker(tmp_path, agent, gated, numbers_its_turns)
    if not comes_back:
        with pytest.raises(UnsupportedError, match="returned without an answer"):
            one(worker)
        return
    group = one(worker)
    assert group.metrics["agent/turns"] == [2.0]
    assert sorted(messages[0]["content"] for messages in group.completions) == sorted(answers)


def test_a_retry_that_says_so_gets_the_same_answer(tmp_path: Path) -> None:
    """The answer was on its way when the connection broke: the `openai` client asks again, and says so."""

    def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        first = said(endpoint, prompt)
        asked = {"model": endpoint.model, "messages": prompt}
        again = sent(endpoint, asked, endpoint.api_key, **{"x-stainless-retry-count": "1"})
        assert again.json()["choices"][0]["message"] == first

    assert one(streaming(tmp_path, agent)).metrics["agent/turns"] == [1.0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"template": None}, "needs a chat template"), ({"tools": [double]}, "an agent calls its own")],
)
def test_what_cannot_be_asked_is_refused_at_the_start(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    if "tools" in changes:
        changes = {"arguments": {"rollout_func": OpenAIHarness(raises), **changes}}
    with pytest.raises(UnsupportedError, match=sentence):
        InProcessWorker(agent_trainer(tmp_path, raises, **changes))


def test_an_evaluation_of_trl_is_refused_at_the_start(tmp_path: Path) -> None:
    trainer = agent_trainer(tmp_path, raises)
    check_agent(trainer)
    trainer.args.eval_strategy = IntervalStrategy.STEPS
    with pytest.raises(UnsupportedError, match=r"eval_strategy='steps'.*--eval-every"):
        check_agent(trainer)


def test_plain_trl_is_told_that_it_needs_a_worker(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="train with --distributed"):
        agent_trainer(tmp_path, raises).train()
