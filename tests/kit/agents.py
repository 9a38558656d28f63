"""Agents that ask a worker's endpoint, and the worker that they ask."""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from async_grpo.envs import Endpoint, OpenAIHarness
from kit.in_process import InProcessWorker
from kit.scripted import ScriptedGenerator
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, length

ASK_S = 60.0


@dataclass(frozen=True)
class Response:
    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def sent(
    endpoint: Endpoint,
    body: Any,
    key: str | None,
    *,
    path: str = "/chat/completions",
    wait_s: float = ASK_S,
    **more: str,
) -> Response:
    """A request by the standard library: `httpx` takes longer to make a client than the endpoint to answer it."""
    address = urlsplit(endpoint.base_url + path)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=wait_s)
    with contextlib.closing(connection):
        authorization = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("POST", address.path, json.dumps(body), {**authorization, **more})
        response = connection.getresponse()
        return Response(response.status, response.headers, response.read())


def posted(endpoint: Endpoint, messages: list[Any], **more: Any) -> Response:
    return sent(endpoint, {"model": endpoint.model, "messages": messages, **more}, endpoint.api_key)


def said(endpoint: Endpoint, messages: list[Any], **more: Any) -> Any:
    """The message of the answer."""
    response = posted(endpoint, messages, **more)
    assert response.status == 200, response.body
    return response.json()["choices"][0]["message"]


def agent_trainer(tmp_path: Path, agent: Any, *, template: str | None = QWEN3_CHAT_TEMPLATE, **changes: Any) -> Any:
    given = {"chat_template": template, "train_dataset": chat_rows(), "reward_funcs": [length]}
    given |= {"arguments": {"rollout_func": OpenAIHarness(agent)}, "max_completion_length": 300}
    return build_trainer(tmp_path, **{**given, **changes})


def agent_worker(tmp_path: Path, agent: Any, engine_of: Any, reply: Any, **changes: Any) -> InProcessWorker:
    return InProcessWorker(agent_trainer(tmp_path, agent, **changes), engine_of(ScriptedGenerator(reply)))


def numbers_its_turns(prompt: str, index: int) -> str:
    turn = prompt.count("<|im_start|>assistant") - 1
    return f"turn {turn} of {index}"
