"""Requests and answers of OpenAI's chat completions. Knows neither model nor server.

What a request may ask for is what the run samples: another distribution would make its log-probabilities wrong. A
parameter that says so is taken, one that changes nothing is passed over, and any other is refused by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.formatting import encodable, one_line

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_BYTES = 8 * 2**20  # of a request; more is no dialogue for any context
_READ = {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "logprobs", "stream", "stream_options"}
_NO_MATTER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": {},
    "top_logprobs": 0,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "functions": [],
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}


class RequestRefusal(Exception):
    """A request that is not answered, as OpenAI's API says it.

    Args:
        ends: the episode has come to its greatest length: no fault of the harness.
    """

    def __init__(
        self, message: str, *, code: str, status: int = 400, param: str | None = None, ends: bool = False
    ) -> None:
        super().__init__(message)
        self.code, self.status, self.param, self.ends = code, status, param, ends

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


FAILED_WITH_ITS_GROUP = "group_failed"


def no_episode(cause: str = "") -> RequestRefusal:
    """`cause`: why the episode of the key is over, where another call of its group failed."""
    if cause:
        text = f"The episode of this key is over, as its group has failed: {cause}"
        return RequestRefusal(text, code=FAILED_WITH_ITS_GROUP, status=401)
    return RequestRefusal(
        "The key of this request is of no episode that is open here. Each call of an agent has its own, "
        "endpoint.api_key, and it ends with the call: ask from within the agent, with that key, and let no request "
        "outlive it.",
        code="invalid_api_key",
        status=401,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a request may say of model and sampling: each value that the run samples with, or would."""

    model: str
    sampling: Mapping[str, Sequence[float]]  # by parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    messages: Sequence[Message]
    tools: Sequence[Any]
    max_tokens: int | None
    logprobs: bool
    stream: bool
    with_usage: bool  # as the last chunk of a stream
    is_retry: bool  # the client says so


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model wrote in one turn."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    tokens: Sequence[tuple[str, float]]  # text and log-probability of each


def read_request(body: bytes, rules: Rules, *, is_retry: bool = False) -> Request:
    """Raises `RequestRefusal`."""
    given = _parsed(body)
    _check_parameters(given, rules)
    most = [_count(given, name) for name in ("max_completion_tokens", "max_tokens")]
    options = given.get("stream_options") or {}
    return Request(
        messages=_messages(given.get("messages")),
        tools=_list_of_dicts(given.get("tools") or [], "tools"),
        max_tokens=min((value for value in most if value is not None), default=None),
        logprobs=_flag(given, "logprobs"),
        stream=_flag(given, "stream"),
        with_usage=isinstance(options, dict) and options.get("include_usage") is True,
        is_retry=is_retry,
    )


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefusal(f"The request's body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(given, dict):
        raise RequestRefusal("The request's body is not a JSON object.", code="invalid_json")
    return given


def _check_parameters(given: Mapping[str, Any], rules: Rules) -> None:
    if given.get("model") != rules.model:
        raise RequestRefusal(
            f"This endpoint has one model, {rules.model!r}: the policy that is trained. The request asks for "
            f"{given.get('model')!r}. Ask for endpoint.model, or name the one that the agent asks for: "
            "OpenAIHarness(agent, model=…). What another model says has to come from its own endpoint.",
            code="model_not_found",
            status=404,
            param="model",
        )
    for name, value in given.items():
        if value is None or name in _READ | _NO_MATTER:
            continue
        if name in rules.sampling:
            _check_sampling(name, value, rules.sampling[name])
        elif name not in _NEUTRAL or value != _NEUTRAL[name]:
            raise _unsupported(name, value)


def _check_sampling(name: str, value: Any, allowed: Sequence[float]) -> None:
    if isinstance(value, bool) or value not in allowed:
        raise RequestRefusal(
            f"{name}={one_line(repr(value))}, but the run samples with {allowed[0]:g}. Training needs tokens of the "
            f"distribution that it trains, so a request cannot change it. Leave {name} out, or set it in the "
            "GRPOConfig.",
            code="unsupported_value",
            param=name,
        )


def _unsupported(name: str, value: Any) -> RequestRefusal:
    why = {
        "n": "an episode is one completion, and each of its turns has one continuation",
        "stop": "an engine stops where the run says, for all its requests. Set stop_strings in generation_kwargs",
        "seed": "completions of a group have to differ, so the run seeds each of them",
    }.get(name, "what is sampled, and how, is the run's, or its log-probabilities would be of another distribution")
    return RequestRefusal(
        f"{name}={one_line(repr(value))} is not supported here: {why}. Leave it out of the request.",
        code="unsupported_parameter" if name not in _NEUTRAL else "unsupported_value",
        param=name,
    )


def _messages(given: Any) -> list[Message]:
    messages = [read_message(message, index) for index, message in enumerate(_list_of_dicts(given, "messages"))]
    if not messages:
        raise RequestRefusal("messages is empty.", code="invalid_value", param="messages")
    if messages[-1]["role"] == "assistant":
        raise RequestRefusal(
            "The last message is the assistant's. The endpoint answers messages; it does not continue one that is "
            "begun, whose beginning the model has not written.",
            code="unsupported_value",
            param=f"messages.[{len(messages) - 1}].role",
        )
    return messages


def read_message(given: Mapping[str, Any], index: int = 0) -> Message:
    """What of a message a chat template sees, in one form however the client wrote it. Raises `RequestRefusal`."""
    where, role = f"messages.[{index}]", given.get("role")
    if role not in ROLES:
        raise RequestRefusal(
            f"{where}.role must be one of {', '.join(ROLES)}.", code="invalid_value", param=f"{where}.role"
        )
    message: Message = {"role": role, "content": _text(given.get("content"), f"{where}.content")}
    if calls := given.get("tool_calls"):
        message["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in _list_of_dicts(calls, "tool_calls")]
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = encodable(str(given[name]))
    return message


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise RequestRefusal(f"{where} must be a text, or a list of parts.", code="invalid_type", param=where)
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestRefusal(
                f"{where} has a part of the type {part.get('type')!r}. This endpoint takes text alone: images in "
                "dialogues are those of environments (environment_factory).",
                code="unsupported_value",
                param=where,
            )
    return encodable("".join(part["text"] for part in parts))


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not all(isinstance(function.get(x), str) for x in ("name", "arguments")):
        raise RequestRefusal(
            f"{where}: a call has a function with a name, and its arguments as a text of JSON.",
            code="invalid_type",
            param=where,
        )
    called = {name: encodable(function[name]) for name in ("name", "arguments")}
    return {"id": str(call.get("id")), "type": "function", "function": called}


def _list_of_dicts(given: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RequestRefusal(f"{name} must be a list of objects.", code="invalid_type", param=name)
    return given


def _count(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise RequestRefusal(f"{name} must be a whole number of at least 1.", code="invalid_value", param=name)
    return value


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if not isinstance(value, bool | None):
        raise RequestRefusal(f"{name} must be true or false.", code="invalid_type", param=name)
    return bool(value)


# Answers


def completion(answer: Answer, request: Request, *, model: str, number: str) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    choice = {
        "index": 0,
        "message": {"refusal": None, **answer.message},
        "logprobs": _logprobs(answer, request),
        "finish_reason": answer.finish_reason,
    }
    return {**_head("chat.completion", model, number), "choices": [choice], "usage": _usage(answer)}


def chunks(answer: Answer, request: Request, *, model: str, number: str) -> Iterator[str]:
    """The answer to a streamed request, as server-sent events: in one piece, once it is whole."""
    head = _head("chat.completion.chunk", model, number)
    calls = [{"index": index, **call} for index, call in enumerate(answer.message.get("tool_calls", []))]
    delta = {**answer.message, **({"tool_calls": calls} if calls else {})}
    usage = {"usage": None} if request.with_usage else {}
    whole = {"index": 0, "delta": delta, "logprobs": _logprobs(answer, request), "finish_reason": None}
    end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": answer.finish_reason}
    events = [{**head, "choices": [choice], **usage} for choice in (whole, end)]
    if request.with_usage:
        events.append({**head, "choices": [], "usage": _usage(answer)})
    for event in events:
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


def _head(kind: str, model: str, number: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": model}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, written = answer.prompt_tokens, len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _logprobs(answer: Answer, request: Request) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in answer.tokens
        ],
        "refusal": None,
    }
