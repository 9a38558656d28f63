"""A server that we start: ready, killed before and after, a port that is taken, last words, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from http.server import HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
from fake_vllm import Handler

from async_grpo.errors import GeneratorError, UsageError
from async_grpo.serving import guard, vllm_server
from async_grpo.serving.vllm_server import ServerPlan, VLLMServerProcess, free_port
from kit.waiting import until

HERE = Path(__file__).parent
FIRST_PORT = 18000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) + os.getpid() % 400
"""Tests run beside each other, and a port that another one takes is a server that is started again."""
Make = Callable[..., VLLMServerProcess]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Servers that are `fake_vllm.py`, and at the end no process of them."""
    package = tmp_path / "fake" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text((HERE / "fake_vllm.py").read_text())
    monkeypatch.setattr(vllm_server, "POLL_S", 0.02)
    monkeypatch.setattr(vllm_server, "entry_points", lambda **_: ["ours"])
    made = []

    def build(port: int | None = None, **behaviour: Any) -> VLLMServerProcess:
        told = json.dumps({**behaviour, "folder": str(tmp_path)})
        env = {**os.environ, "PYTHONPATH": str(tmp_path / "fake"), "FAKE_VLLM": told}
        plan = ServerPlan(model="M", port=port or free_port("127.0.0.1", FIRST_PORT), log=tmp_path / "log", env=env)
        made.append(VLLMServerProcess(plan))
        return made[-1]

    yield build
    for server in made:
        server.end(grace_s=5.0)
    until(lambda: not any(map(lives, pids(tmp_path))), "the end of all processes")


def lives(pid: int) -> bool:
    """Whether it is one of ours: another process may have its pid by now."""
    try:
        process = psutil.Process(pid)
        text = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and ("sleep(600)" in text or "api_server" in text)
    except psutil.NoSuchProcess:
        return False


def pids(folder: Path) -> list[int]:
    """The pids of every server that was started, and its child."""
    return [pid for path in folder.glob("*.json") for pid in (int(path.stem), json.loads(path.read_text())["child"])]


def test_it_is_started_asked_and_ended(make: Make, tmp_path: Path) -> None:
    with make() as server:
        server.wait_ready(60)
        assert server.answers()
        arguments = json.loads((tmp_path / f"{server.pid}.json").read_text())["arguments"]
    assert not server.running
    assert arguments[:2] == ["--model", "M"] and '{"backend": "async_grpo_ipc"}' in arguments


def test_killed_before_it_is_ready_it_is_started_three_times(make: Make, tmp_path: Path) -> None:
    server = make(hangs=True)
    killed: list[int] = []

    def answers() -> bool:
        if server.pid not in killed and (tmp_path / f"{server.pid}.json").exists():
            killed.append(server.pid)
            os.kill(server.pid, signal.SIGKILL)
            until(lambda: not server.running, "its end")
        return False

    server.answers = answers  # type: ignore[method-assign]
    server.start()
    with pytest.raises(GeneratorError, match=r"(?s)was killed before it was ready.*Loading the weights"):
        server.wait_ready(60)
    assert len(killed) == 3


def test_killed_later_it_is_started_again_and_leaves_nothing(make: Make, tmp_path: Path) -> None:
    with make() as server:
        server.wait_ready(60)
        first = server.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: not server.running, "its end")
        assert not server.answers()
        server.restart()
        server.wait_ready(60)
        assert (server.starts, server.pid != first) == (2, True)


def test_a_server_that_ends_says_why(make: Make) -> None:
    with make(says="ValueError: no such model") as server, pytest.raises(GeneratorError, match="no such model"):
        server.wait_ready(60)
    assert server.starts == 1, "what it said it would say again"


def test_a_wait_has_an_end_and_shows_the_last_line(make: Make, tmp_path: Path) -> None:
    with make(hangs=True) as server:
        until(lambda: pids(tmp_path), "its start")
        with pytest.raises(GeneratorError, match=r"Timed out after 0 s.*Loading the weights"):
            server.wait_ready(0.1)


def test_a_taken_port_is_left_to_its_holder(make: Make) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        with make(port=taken) as server:
            assert server.port > taken
            server.wait_ready(60)


def test_another_program_that_has_its_port_is_not_taken_for_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lives on without a word when it finds its port taken at the end of its start."""
    go = tmp_path / "go"
    with make(waits_for=str(go)) as server:
        restart = server.restart
        monkeypatch.setattr(server, "restart", lambda: go.touch() or restart())
        until(lambda: pids(tmp_path), "its start")
        with HTTPServer(("127.0.0.1", server.port), Handler) as other:
            Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            with urlopen(f"{server.base_url}/health", timeout=60) as answer:
                assert answer.status == 200
            assert not server.answers() and server.running
            server.wait_ready(60)
            assert (server.starts, server.port == other.server_port) == (2, False)
            other.shutdown()


def test_our_plugin_is_among_those_that_the_user_allows() -> None:
    for env, plugins in (({"VLLM_PLUGINS": "other"}, "other,async_grpo_ipc"), ({}, None)):
        assert ServerPlan(model="M", port=1, log=Path("log"), env=env).environment().get("VLLM_PLUGINS") == plugins


def test_an_installation_without_our_backend_is_a_sentence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make()
    monkeypatch.setattr(vllm_server, "entry_points", lambda **_: [])
    with pytest.raises(UsageError, match=r"pip install -e \."):
        server.start()
    assert server.starts == 0


def test_deaths_are_counted_until_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = VLLMServerProcess(ServerPlan(model="m", port=8000, log=tmp_path / "vllm.log"))
    monkeypatch.setattr(server, "restart", lambda: None)
    monkeypatch.setattr(server, "last_words", lambda: "Killed")
    for _ in range(3):
        server.revive(GeneratorError("no answer"))
    server.answered()
    for _ in range(3):
        server.revive(GeneratorError("no answer"))
    with pytest.raises(GeneratorError, match=r"(?s)died 4 times without an answer in between.*vllm.log:\nKilled"):
        server.revive(GeneratorError("no answer"))


# --- A started server answers programs of this machine; a browser that shows a page of the web gets nothing ------


def asked(kind: str = "http", **headers: str) -> list[Any]:
    """What a guarded application sends."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send("answered")

    async def receive() -> Any: ...

    found = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(guard.OnlyThisMachine(app)({"type": kind, "headers": found}, receive, send))
    return sent


OURS = "127.0.0.1:8000"


@pytest.mark.parametrize(
    "headers",
    [
        *({"host": OURS}, {"host": "localhost"}, {"Host": "LocalHost:1"}),
        {"host": OURS, "origin": f"http://{OURS}"},  # its own documentation, in a browser
    ],
)
def test_programs_of_this_machine_are_answered(headers: dict[str, str]) -> None:
    assert asked(**headers) == ["answered"]


@pytest.mark.parametrize(
    "headers",
    [
        *({"host": "evil.example:8000"}, {"host": "127.0.0.1.evil.example"}, {"host": ""}, {}),
        *({"host": OURS, "origin": origin} for origin in ("http://evil.example", "null", "http://127.0.0.1:8001")),
        {"host": OURS, "Origin": "https://evil.example"},
    ],
)
def test_pages_of_the_web_are_not(headers: dict[str, str]) -> None:
    assert asked(**headers)[0]["status"] == 403
    assert asked("websocket", **headers) == [{"type": "websocket.close", "code": 1008}]


def test_a_started_vllm_has_the_guard() -> None:
    command = ServerPlan(model="M", port=1, log=Path("log"), env={}).command()
    module, _, name = command[command.index("--middleware") + 1].rpartition(".")
    assert (module, getattr(guard, name)) == (guard.__name__, guard.OnlyThisMachine)
