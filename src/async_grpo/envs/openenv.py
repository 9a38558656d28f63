"""Environments of OpenEnv (openenv-core 0.3) for TRL's `environment_factory`.

    GRPOTrainer(environment_factory=openenv_environment("http://127.0.0.1:8000"), ...)

What the server's environment takes becomes the model's tools: those that it lists (MCP), or one tool `step` with the
fields of its action. Each completion has a session of its own on the server.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any, ClassVar

from async_grpo.errors import PeerDiedError, UnsupportedError, UsageError

REQUEST_S = 10.0  # for the server to describe itself
_ALSO_THERE = {"done", "reward", "metadata"}  # of every observation; an action has `metadata` too
_OF_MCP = {"Action", "CallToolAction", "ListToolsAction"}  # the actions of an environment whose tools are listed
_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


class OpenEnvSession:
    """A session on the server: `reset` and `get_reward` are TRL's, and a subclass has the tools."""

    thread_safe: ClassVar[bool] = True  # sessions know nothing of each other
    base_url: ClassVar[str]
    _connect: ClassVar[Callable[[], Any]]  # a client of the server

    def __init__(self) -> None:
        self._client: Any = None
        self._reward = 0.0
        self._done = False
        self._lost: Exception | None = None

    def reset(self, reset: Mapping[str, Any] | None = None, **row: Any) -> str:
        """Begin an episode, with the arguments in the dataset's column `reset`; returns the first observation."""
        self._reward, self._done, self._lost = 0.0, False, None
        given = {name: value for name, value in (reset or {}).items() if value is not None}
        try:
            self._client = self._client or type(self)._connect()
            result = self._client.reset(**given)
        except Exception as error:
            raise self._broken(error) from error
        return _text(result.observation)

    def get_reward(self) -> float:
        """The sum of the rewards of the episode's steps. Raises `PeerDiedError` if the server was lost in it."""
        if self._lost is not None:
            raise PeerDiedError(str(self._lost)) from self._lost
        return self._reward

    def _step(self, action: Mapping[str, Any]) -> Any:
        """What is observed after the action; a `ValueError`, which the model reads, where it was refused."""
        if self._done:
            raise ValueError("The episode has ended.")
        try:
            result = self._client.step(dict(action))
        except RuntimeError as error:  # the server's own answer
            raise ValueError(str(error)) from error
        except Exception as error:
            self._lost = self._broken(error)
            raise self._lost from error
        self._reward += float(result.reward or 0.0)
        self._done = bool(result.done)
        return result.observation

    def _broken(self, error: Exception) -> PeerDiedError:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(Exception):  # it is lost, and its thread is to end
                client.close()
        return PeerDiedError(
            f"The OpenEnv server at {self.base_url} ended a session ({type(error).__name__}: {error}). Each completion "
            "has one: the server must allow as many (max_concurrent_envs) as all workers generate at a time."
        )


def openenv_environment(base_url: str, *, message_timeout_s: float = 60.0) -> type[OpenEnvSession]:
    """A class for `environment_factory`, made of what the server says of itself.

    Raises:
        UsageError: openenv-core is not installed, or the server does not answer.
        UnsupportedError: its actions cannot be tools.
    """
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise UsageError(
            f"OpenEnv's client cannot be imported ({error}). Install it with `pip install 'async-grpo[openenv]'`."
        ) from error

    def connect() -> Any:
        return GenericEnvClient(base_url=base_url, message_timeout_s=message_timeout_s).sync()

    schema = _action_schema(base_url)
    tools = _listed(connect(), base_url) if schema.get("title") in _OF_MCP else {"step": _stepping(schema)}
    for name in tools:
        if not name.isidentifier() or name.startswith("_") or hasattr(OpenEnvSession, name):
            raise UnsupportedError(f"The environment at {base_url} has a tool {name!r}, which no method can be called.")
    return type("OpenEnv", (OpenEnvSession,), {"base_url": base_url, "_connect": staticmethod(connect), **tools})


def _action_schema(base_url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{base_url.rstrip('/')}/schema", timeout=REQUEST_S) as answer:
            return json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"No OpenEnv server answers at {base_url} ({type(error).__name__}: {error}). Start it before the run, and "
            "give the address that its uvicorn prints."
        ) from error


def _stepping(schema: Mapping[str, Any]) -> Callable[..., str]:
    def step(self: OpenEnvSession, **action: Any) -> str:
        return _text(self._step(action))

    return _described(step, "step", "Take the next step in the environment.", schema)


def _listed(client: Any, base_url: str) -> dict[str, Callable[..., str]]:
    """The tools that the environment lists."""
    with client:
        tools = client.step({"type": "list_tools"}).observation.get("tools")
    if not tools:
        raise UnsupportedError(f"The environment at {base_url} lists no tools, so the model could do nothing in it.")
    return {tool["name"]: _calling(tool) for tool in tools}


def _calling(tool: Mapping[str, Any]) -> Callable[..., str]:
    name = tool["name"]

    def call(self: OpenEnvSession, **arguments: Any) -> str:
        observed = self._step({"type": "call_tool", "tool_name": name, "arguments": arguments})
        if observed.get("error"):
            raise ValueError(str(observed["error"].get("message", observed["error"])))
        return _returned(observed.get("result"))

    return _described(call, name, tool.get("description") or "", tool["input_schema"])


def _returned(result: Any) -> str:
    """What a listed tool returned: the texts of MCP's content blocks, where it is that."""
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return _text(result)
    text = "\n".join(map(_part, result["content"]))
    if result.get("is_error") or result.get("isError"):
        raise ValueError(text)
    return text


def _part(part: Any) -> str:
    return str(part.get("text", f"<{part.get('type')}>")) if isinstance(part, Mapping) else _text(part)


def _described(tool: Callable[..., str], name: str, description: str, schema: Mapping[str, Any]) -> Callable[..., str]:
    """Give the function what TRL makes the tool's schema of: a signature, annotations and a docstring."""
    required = set(schema.get("required", ()))
    fields = {field: about for field, about in schema.get("properties", {}).items() if field not in _ALSO_THERE}
    parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for field, about in sorted(fields.items(), key=lambda item: item[0] not in required):
        default = Parameter.empty if field in required else about.get("default")
        kind = _type(about, optional=field not in required)
        try:
            parameters.append(Parameter(field, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind))
        except ValueError as error:
            raise UnsupportedError(f"An action of the environment has the field {field!r}: {error}.") from error
    lines = [f"    {field}: {_line(about.get('description')) or field}" for field, about in fields.items()]
    arguments = "\n".join(["Args:", *lines, "", ""]) if lines else ""
    tool.__name__ = tool.__qualname__ = name
    tool.__doc__ = f"{_line(description) or name}\n\n{arguments}Returns:\n    What is observed then."
    tool.__annotations__ = {each.name: each.annotation for each in parameters[1:]} | {"return": str}
    tool.__signature__ = Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    return tool


def _type(about: Mapping[str, Any], *, optional: bool) -> Any:
    kinds = [about.get("type"), *(choice.get("type") for choice in about.get("anyOf", ()))]
    known = next((_TYPES[kind] for kind in kinds if isinstance(kind, str) and kind in _TYPES), dict)
    return known | None if optional or "null" in kinds else known


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _text(observed: Any) -> str:
    """What the model reads: a text as it is, an observation with one field as that, anything else as JSON."""
    if isinstance(observed, Mapping):
        observed = {name: value for name, value in observed.items() if name not in _ALSO_THERE}
        if len(observed) == 1:
            (observed,) = observed.values()
    return observed if isinstance(observed, str) else json.dumps(observed, ensure_ascii=False)
