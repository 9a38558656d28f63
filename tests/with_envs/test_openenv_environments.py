"""OpenEnv's own template environment on its own server, and one with listed tools: played, trained on, lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv.core", reason="openenv-core is not installed here: `make test-envs` has it")

from openenv_servers import calls, from_template, served

from async_grpo.envs.openenv import openenv_environment
from async_grpo.errors import AsyncGRPOError, UsageError
from kit.in_process import InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows

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


def worker_of(environment: Any, reply: Any, folder: Path) -> InProcessWorker:
    given = {"arguments": {"environment_factory": environment}, "train_dataset": chat_rows(2), "reward_funcs": []}
    trainer = build_trainer(folder, chat_template=QWEN3_CHAT_TEMPLATE, max_completion_length=800, **given)
    return InProcessWorker(trainer, ScriptedEngine(ScriptedGenerator(reply)))


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
