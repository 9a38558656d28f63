"""The endpoint of agents, as other users of the machine may use it: without a key, or without an end.

A connection of this test's own counts as another user's where the effective user id is made another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.envs import Endpoint
from async_grpo.log import logger
from async_grpo.rollout.endpoint import server
from async_grpo.rollout.endpoint.protocol import (
    Answer,
    Request,
    RequestRefusal,
    Rules,
    chunks,
    completion,
    read_message,
    read_request,
)
from async_grpo.rollout.endpoint.server import EndpointServer
from kit.waiting import DEADLINE_S, until

BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}).encode()


class Served:
    """An endpoint with one open episode."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.refused: list[RequestRefusal] = []
        server = EndpointServer(loop)
        base_url = server.start()
        self.port = int(base_url.rpartition(":")[2].removesuffix("/v1"))
        episode: Any = SimpleNamespace(
            rules=Rules(model="policy", sampling={}), number="1_0", answer=self._answer, refuse=self.refused.append
        )
        self._key = server.open(episode)
        self.endpoint = Endpoint(base_url=base_url, api_key=self._key, model="policy")

    async def _answer(self, request: Request) -> Answer:
        return Answer(message={"role": "assistant", "content": "Hi"}, finish_reason="stop", prompt_tokens=1, tokens=[])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)

    def ask(self, body: bytes = BODY, headers: str = "", *, host: str = "127.0.0.1", with_key: bool = True) -> bytes:
        """The whole answer."""
        with self.connect() as client:
            client.sendall(self.request(body, headers, host=host, with_key=with_key))
            return b"".join(iter(lambda: client.recv(65536), b""))

    def request(self, body: bytes, headers: str = "", *, host: str = "127.0.0.1", with_key: bool = True) -> bytes:
        key = f"Authorization: Bearer {self._key}\r\n" if with_key else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{key}{headers}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
def served() -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield Served(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def all_are_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    of_user = server.connections_of
    monkeypatch.setattr(server, "MOST_STRANGERS", 8)
    monkeypatch.setattr(server, "connections_of", lambda uid: of_user(uid + 1))


@pytest.mark.usefixtures("all_are_strangers")
def test_connections_of_other_users_take_no_agent_its_own_and_the_worker_few_files(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known agent is answered when they have taken all connections, and those that come at once go at once."""
    monkeypatch.setattr(server, "KEY_S", 600.0)
    with served.connect() as agents:
        agents.sendall(served.request(BODY).replace(b"Connection: close\r\n", b""))
        first = b""
        while b'"Hi"' not in first:
            first += agents.recv(65536)
        idle = [served.connect() for _ in range(3 * server.MOST_STRANGERS)]
        for client in idle:
            client.sendall(b"POST /v1/chat")
        until(lambda: sum(map(_is_open, idle)) <= server.MOST_STRANGERS)
        agents.sendall(served.request(BODY))
        assert b"200 OK" in b"".join(iter(lambda: agents.recv(65536), b""))
    for client in idle:
        client.close()


def test_an_agents_connection_by_tcp_is_never_put_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_STRANGERS", 2)
    ours = [served.connect() for _ in range(8)]
    addresses = {client.getsockname() for client in ours}
    with socket.socket(socket.AF_INET6) as mapped, contextlib.suppress(OSError):  # no IPv6 here
        mapped.connect(("::ffff:127.0.0.1", served.port))
        addresses.add(("127.0.0.1", mapped.getsockname()[1]))
        assert addresses <= server.connections_of(os.geteuid())
    assert addresses & server.connections_of(os.geteuid() + 1) == set()
    for client in ours:
        client.sendall(served.request(BODY))
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_put_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_STRANGERS", 4)
    program = """if True:
        import encodings.idna, os, socket, sys
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        idle = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(4)]
        print(idle[0].recv(1))
    """
    with served.connect() as ours:
        command = [sys.executable, "-c", program, str(served.port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert ended.stdout.splitlines() == ["b''"], ended.stderr
        ours.sendall(served.request(BODY))
        assert ours.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("all_are_strangers")
def test_a_connection_without_a_key_ends_and_one_with_a_key_does_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a key passes when this test says so: a busy machine may be slow to send one."""
    timers: list[tuple[asyncio.TimerHandle, Callable[[], None]]] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def call_later(seconds: float, end: Callable[..., None], stranger: Any) -> asyncio.TimerHandle:
        assert seconds == server.KEY_S
        loops.append(asyncio.get_running_loop())
        timer = loops[-1].call_later(seconds + 3600.0, end, stranger)
        timers.append((timer, partial(end, stranger)))
        return timer

    def pass_time() -> None:
        for timer, end in timers:
            if not timer.cancelled():
                end()

    own = {"get_running_loop": lambda: SimpleNamespace(call_later=call_later)}
    monkeypatch.setattr(server, "asyncio", SimpleNamespace(**vars(asyncio) | own))
    with served.connect() as agents, served.connect() as idle:
        asked = served.request(BODY).replace(b"Connection: close\r\n", b"")
        agents.sendall(asked)
        assert agents.recv(65536).startswith(b"HTTP/1.1 200")
        until(lambda: len(timers) == 2)
        loops[0].call_soon_threadsafe(pass_time)
        assert idle.recv(1) == b""
        agents.sendall(asked)
        assert agents.recv(65536).startswith(b"HTTP/1.1 200")


def test_who_has_no_key_gets_nothing_whatever_the_host(served: Served) -> None:
    for host in ("127.0.0.1", "evil.example"):
        assert served.ask(host=host, with_key=False).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"\x1f\x8b nonsense", "Content-Encoding: gzip\r\n"),
        (b'{"tools":' + b"[" * 100_000, ""),
    ],
)
def test_a_body_that_is_none_is_refused_as_openai_does_and_the_episode_knows(
    served: Served, body: bytes, headers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = served.ask(body, headers)
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_json"
    until(lambda: len(served.refused) == 1)
    assert "Traceback" not in "".join(capsys.readouterr())


def test_what_is_no_http_fills_no_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.connect() as client:
        client.sendall(b"GET http://[" + b"a" * 20_000 + b"\r\n\r\n")
        assert b" 400 " in client.recv(65536)
    assert not caplog.records


def test_a_stranger_writes_no_line_of_its_own_into_the_log(served: Served) -> None:
    lines: list[str] = []
    number = logger.add(lines.append, format="{message}")
    with served.connect() as client:
        client.sendall(b"GET /%0a12:00:00%20INFO%20all%20is%20well" + b"%20x" * 200 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 404 " in client.recv(65536)
    logger.remove(number)
    [line] = lines
    assert line.count("\n") == 1 and r"GET /\n12:00:00 INFO all is well" in line
    assert len(line) < 250


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        client.setblocking(True)


# --- Requests of OpenAI's API, without a model: ------------------------------------------------------------------

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
