"""Requests of OpenAI's API, without a model: what is taken, what is refused, and the form of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from async_grpo.rollout.endpoint.protocol import (
    Answer,
    RequestRefusal,
    Rules,
    chunks,
    completion,
    read_message,
    read_request,
)

RULES = Rules(model="policy", sampling={"temperature": [0.7], "top_p": [1.0], "top_k": [0, -1]})
USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "double", "arguments": '{"number": 2}'}}


def body(**changes: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": [USER], **changes}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7, "top_p": 1, "top_k": -1, "n": 1, "stop": None, "seed": None},
        {"tools": [{"type": "function"}], "tool_choice": "auto", "parallel_tool_calls": True},
        {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}},
        {"user": "somebody", "metadata": {"a": "b"}, "store": False},
        {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
    ],
)
def test_what_changes_no_distribution_is_taken(changes: dict[str, Any]) -> None:
    assert read_request(body(**changes), RULES).messages == [USER]


@pytest.mark.parametrize(
    ("changes", "status", "code", "param"),
    [
        ({"model": "gpt-5"}, 404, "model_not_found", "model"),
        ({"temperature": 1.0}, 400, "unsupported_value", "temperature"),
        ({"top_p": 0.9}, 400, "unsupported_value", "top_p"),
        ({"n": 2}, 400, "unsupported_value", "n"),
        ({"stop": ["\n"]}, 400, "unsupported_value", "stop"),
        ({"seed": 1}, 400, "unsupported_parameter", "seed"),
        ({"logit_bias": {"5": 10}}, 400, "unsupported_value", "logit_bias"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_value", "response_format"),
        ({"tool_choice": "required"}, 400, "unsupported_value", "tool_choice"),
        ({"reasoning_effort": "high"}, 400, "unsupported_parameter", "reasoning_effort"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": "Hello"}, 400, "invalid_type", "messages"),
        ({"messages": [{"role": "robot"}]}, 400, "invalid_value", "messages.[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, 400, "unsupported_value", "messages.[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "unsupported_value", None),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}, USER]}, 400, "invalid_type", None),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"stream": "yes"}, 400, "invalid_type", "stream"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], status: int, code: str, param: str | None) -> None:
    with pytest.raises(RequestRefusal) as refused:
        read_request(body(**changes), RULES)
    error = refused.value.body()["error"]
    assert (refused.value.status, error["code"]) == (status, code)
    assert param is None or error["param"] == param
    assert error["type"].endswith("error") and len(error["message"]) > 10


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": "policy"', b"[" * 10_000])
def test_a_body_that_is_no_request(text: bytes) -> None:
    with pytest.raises(RequestRefusal, match="body"):
        read_request(text, RULES)


def test_a_message_is_the_same_however_it_is_written() -> None:
    """As the agent wrote it, and as `model_dump` of the client gives it back."""
    dumped = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    given = read_message({**dumped, "function_call": None, "tool_calls": [CALL]})
    assert given == read_message({"role": "assistant", "content": "", "tool_calls": [CALL]})
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert read_message({"role": "user", "content": parts}) == USER


def test_a_lone_surrogate_is_no_text() -> None:
    request = read_request(b'{"model": "policy", "messages": [{"role": "user", "content": "a\\ud800b"}]}', RULES)
    assert request.messages[0]["content"] == "a?b"


ANSWER = Answer(
    message={"role": "assistant", "content": None, "tool_calls": [CALL]},
    finish_reason="tool_calls",
    prompt_tokens=3,
    tokens=[("d", -0.5), ("o", -1.0)],
)


def test_the_form_of_an_answer() -> None:
    made = completion(ANSWER, read_request(body(logprobs=True), RULES), model="policy", number="7")
    assert (made["object"], made["model"], made["id"]) == ("chat.completion", "policy", "chatcmpl-7")
    assert made["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    [choice] = made["choices"]
    assert choice["message"]["tool_calls"] == [CALL]
    assert [(token["token"], token["logprob"]) for token in choice["logprobs"]["content"]] == [("d", -0.5), ("o", -1.0)]


def test_the_form_of_a_streamed_answer() -> None:
    asked = read_request(body(stream=True, stream_options={"include_usage": True}), RULES)
    *events, done = list(chunks(ANSWER, asked, model="policy", number="7"))
    assert done == "data: [DONE]\n\n"
    whole, end, usage = (json.loads(event.removeprefix("data: ")) for event in events)
    assert whole["choices"][0]["delta"]["tool_calls"] == [{"index": 0, **CALL}]
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "tool_calls")
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
