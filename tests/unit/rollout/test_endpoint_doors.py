"""The endpoint of agents, as other users of the machine may use it: without a key, or without an end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.rollout.endpoint import doors
from async_grpo.rollout.endpoint.protocol import Answer, Refusal, Request, Rules
from async_grpo.rollout.endpoint.server import EndpointServer
from patience import DEADLINE_S, until

BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}).encode()


class Served:
    """An endpoint with one open episode."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.refused: list[Refusal] = []
        server = EndpointServer(loop)
        self._address = ("127.0.0.1", int(server.start().rpartition(":")[2].removesuffix("/v1")))
        episode: Any = SimpleNamespace(
            rules=Rules(model="policy", sampling={}), number="1_0", answer=self._answer, refuse=self.refused.append
        )
        self._key = server.open(episode)

    async def _answer(self, request: Request) -> Answer:
        return Answer(message={"role": "assistant", "content": "Hi"}, finish_reason="stop", prompt_tokens=1, tokens=[])

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=DEADLINE_S)

    def ask(self, body: bytes = BODY, headers: str = "", *, host: str = "127.0.0.1", with_key: bool = True) -> bytes:
        """The whole answer."""
        key = f"Authorization: Bearer {self._key}\r\n" if with_key else ""
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{key}{headers}"
        with self.connect() as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.fixture
def served() -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield Served(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_connections_without_a_key_do_not_keep_an_agent_out_or_take_the_workers_files(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "MOST_STRANGERS", 8)
    idle = [served.connect() for _ in range(3 * doors.MOST_STRANGERS)]
    for client in idle:
        client.sendall(b"POST /v1/chat")
    assert b"200 OK" in served.ask()
    until(lambda: sum(map(_is_open, idle)) <= doors.MOST_STRANGERS)
    for client in idle:
        client.close()


def test_a_connection_without_a_key_ends_and_one_with_a_key_does_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a key passes when this test says so: a busy machine may be slow to send one."""
    timers: list[tuple[asyncio.TimerHandle, Callable[[], None]]] = []
    loops: list[asyncio.AbstractEventLoop] = []

    def call_later(seconds: float, end: Callable[..., None], stranger: Any) -> asyncio.TimerHandle:
        assert seconds == doors.KEY_S
        loops.append(asyncio.get_running_loop())
        timer = loops[-1].call_later(seconds + 3600.0, end, stranger)
        timers.append((timer, partial(end, stranger)))
        return timer

    def pass_time() -> None:
        for timer, end in timers:
            if not timer.cancelled():
                end()

    monkeypatch.setattr(
        doors, "asyncio", SimpleNamespace(get_running_loop=lambda: SimpleNamespace(call_later=call_later))
    )
    with served.connect() as agents, served.connect() as idle:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {served._key}\r\n"
        asked = f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
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
        (b"\xff", ""),
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
