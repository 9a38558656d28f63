"""OpenEnv's own template environment on its own server, and one with listed tools: played, trained on, lost."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv.core", reason="openenv-core is not installed here: `make test-envs` has it")

from async_grpo.envs.openenv import openenv_environment
from async_grpo.errors import AsyncGRPOError, UsageError
from async_grpo.telemetry.waiting import wait_until
from kit.in_process import (
    QWEN3_CHAT_TEMPLATE,
    InProcessWorker,
    ScriptedEngine,
    ScriptedGenerator,
    build_tokenizer,
    build_trainer,
    chat_rows,
    jobs_of,
)

TEMPLATE = Path(importlib.util.find_spec("openenv.cli").origin).parent / "templates" / "openenv_env"  # type: ignore[union-attr,arg-type]
NAMES = {
    "__ENV_NAME__": "echo_env",
    "__ENV_CLASS_NAME__": "Echo",
    "__ENV_TITLE_NAME__": "Echo",
    "max_concurrent_envs=1": "max_concurrent_envs=8",
}
LISTED = """
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("shop")

        @tools.tool
        def price(article: str, count: int = 1) -> str:
            '''What it costs.'''
            return f"{article}: {3 * count}"

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **_):
        return Observation(done=False, reward=0.0, metadata={})

    def _step_impl(self, action, timeout_s=None, **_):
        raise ValueError("no such action")

    @property
    def state(self):
        return State(episode_id="1", step_count=0)


app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=8)
"""


def from_template(folder: Path) -> Path:
    """The package that `openenv init echo_env` writes; without the lock, which needs a network."""
    package = folder / "echo_env"
    shutil.copytree(TEMPLATE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*package.rglob("*.py")]:
        text = path.read_text()
        for name, value in NAMES.items():
            text = text.replace(name, value)
        path.with_name(path.name.replace("__ENV_NAME__", "echo_env")).write_text(text)
    return package


@contextmanager
def served(application: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", application, "--port", str(port)], cwd=folder, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _answers(port, server, folder) or None, what="the OpenEnv server", timeout_s=120)
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.kill()
        server.wait()


def _answers(port: int, server: subprocess.Popen[bytes], folder: Path) -> bool:
    assert server.poll() is None, (folder / "server.log").read_text()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def worker_of(environment: Any, reply: Any, folder: Path) -> InProcessWorker:
    trainer = build_trainer(
        folder,
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[],
        train_dataset=chat_rows(2),
        arguments={"environment_factory": environment},
        max_completion_length=800,
    )
    return InProcessWorker(trainer, ScriptedEngine(ScriptedGenerator(build_tokenizer(QWEN3_CHAT_TEMPLATE), reply)))


def calls(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_the_template_environment_of_openenv_is_played_and_scores(tmp_path: Path) -> None:
    def reply(prompt: str, index: int) -> str:
        if "<tool_response>" in prompt:
            return "done"
        assert "Echo environment ready!" in prompt
        return calls("step", '{"message": "hello"}' if index % 2 else '{"text": "hello"}')

    from_template(tmp_path)
    with served("echo_env.server.app:app", tmp_path) as (url, server):
        worker = worker_of(openenv_environment(url), reply, tmp_path)
        (group,) = worker.rollouts(jobs_of(chat_rows(1)))
        assert group.rewards[:, 0].tolist() == pytest.approx([0.0, 0.5]), "a tenth for each letter"
        wrong, right = ([m["content"] for m in completion if m["role"] == "tool"] for completion in group.completions)
        assert right == ['{"echoed_message": "hello", "message_length": 5}']
        assert "message" in wrong[0]
        assert "rror" in wrong[0]

        server.kill()
        server.wait()
        with pytest.raises(AsyncGRPOError, match=r"ended a session.*max_concurrent_envs"):
            worker.rollouts(jobs_of(chat_rows(1)))
    with pytest.raises(UsageError, match="No OpenEnv server answers"):
        openenv_environment(url)


def test_a_server_that_is_lost_in_an_episode_fails_the_group(tmp_path: Path) -> None:
    from_template(tmp_path)
    with served("echo_env.server.app:app", tmp_path) as (url, server):

        def reply(prompt: str, index: int) -> str:
            if "<tool_response>" in prompt:
                return "done"
            server.kill()
            server.wait()
            return calls("step", '{"message": "hello"}')

        worker = worker_of(openenv_environment(url), reply, tmp_path)
        with pytest.raises(AsyncGRPOError, match="ended a session"):
            worker.rollouts(jobs_of(chat_rows(1)))


def test_listed_tools_become_tools(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(LISTED)

    def reply(prompt: str, index: int) -> str:
        if "<tool_response>" in prompt:
            return "done"
        assert '"name": "price"' in prompt
        return calls("price", '{"article": "tea", "count": 2}' if index % 2 else '{"count": 2}')

    with served("shop:app", tmp_path) as (url, _):
        (group,) = worker_of(openenv_environment(url), reply, tmp_path).rollouts(jobs_of(chat_rows(1)))
    wrong, right = ([m["content"] for m in completion if m["role"] == "tool"] for completion in group.completions)
    assert right == ["tea: 6"]
    assert "article" in wrong[0]
    assert "rror" in wrong[0]
