"""A started server answers programs of this machine; a browser that shows a page of the web gets nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from async_grpo.serving import guard
from async_grpo.serving.vllm_server import ServerPlan


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
