"""The tools of tasks, called in this process. verifiers starts a server for each toolset, and so a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer

from async_grpo.envs.verifiers.refusals import refuse_toolset

MOST_TEXT = 65_536  # characters of a result; of a longer one, the model reads the beginning
SHOWN = 2_000
_STATE: ContextVar[vf.State] = ContextVar("state of the episode")


class Toolsets:
    """Toolsets of one call of a `rollout_func`: those of the taskset are shared by its episodes."""

    def __init__(self, environment: vf.Env) -> None:
        self._environment = environment
        self._shared: Toolset | None = None
        self._preparing = asyncio.Lock()

    async def of(self, task: vf.Task, state: vf.State) -> Toolset:
        """The tools of one episode, ready to be called."""
        async with self._preparing:
            if self._shared is None:
                taskset = self._environment.taskset
                self._shared = await Toolset(taskset.toolsets(taskset.config)).ready(None)
        _STATE.set(state)
        own = await Toolset(task.toolsets(task.config)).ready(task.data)
        return own.with_those_of(self._shared)


class Toolset:
    def __init__(self, toolsets: Sequence[vf.Toolset]) -> None:
        self._toolsets = toolsets
        self._servers: dict[str, tuple[MCPServer, str]] = {}  # by the tool's name for the model
        self.schemas: list[dict[str, Any]] = []

    async def ready(self, data: vf.TaskData | None) -> Toolset:
        """Set the toolsets up, with the task's data where they are the task's."""
        for toolset in self._toolsets:
            refuse_toolset(toolset)
            toolset._pull_state, toolset._push_state = _pull, _push
            await toolset.setup()
            if data is not None:
                await toolset.setup_task(data)
            server = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset.register(server)
            for tool in await server.list_tools():
                name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
                self._servers[name] = (server, tool.name)
                function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                self.schemas.append({"type": "function", "function": function})
        return self

    def with_those_of(self, others: Toolset) -> Toolset:
        self._servers = {**others._servers, **self._servers}
        self.schemas = [*others.schemas, *self.schemas]
        return self

    async def call(self, call: dict[str, Any]) -> tuple[str, str]:
        """The name of a tool that the model has called, and what came of it: a failure is text too."""
        function = call.get("function")
        if not isinstance(function, dict):
            return str(call.get("name", "tool")), f"Error: {call.get('type')}"
        name, arguments = str(function.get("name")), function.get("arguments") or {}
        if name not in self._servers:
            return name, f"Error: there is no tool {name!r}"
        if not isinstance(arguments, dict):
            return name, "Error: the arguments are not an object"
        server, own_name = self._servers[name]
        try:
            return name, _text(await server.call_tool(own_name, arguments))
        except Exception as error:  # noqa: BLE001  # whatever a tool raises is text for the model
            return name, f"Error: {error}"
        except (SystemExit, KeyboardInterrupt) as error:
            return name, f"Error: {type(error).__name__}: {error}"


async def _pull() -> vf.State:
    return _STATE.get()


async def _push(before: bytes) -> None:
    """The state is the episode's own object."""


def _text(result: Any) -> str:
    parts = [part.text if hasattr(part, "text") else f"<{part.type}>" for part in result.content]
    text = "\n".join(parts) or json.dumps(result.structured_content)
    if len(text) > MOST_TEXT:
        text = f"Error: the result has {len(text):,} characters, of which {MOST_TEXT:,} can be read: {text[:SHOWN]}"
    return text.encode("utf-8", "replace").decode()  # no tokenizer takes lone surrogates
