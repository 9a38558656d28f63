"""What TRL sees of an OpenEnv environment, and its sessions, with a client that plays the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import get_json_schema

from async_grpo.envs import openenv
from async_grpo.envs.openenv import OpenEnvSession
from async_grpo.errors import PeerDiedError, UnsupportedError

SCHEMA = {
    "title": "MoveAction",
    "properties": {
        "metadata": {"type": "object"},
        "times": {"type": "integer", "default": 1, "description": "How often.\nAt least once."},
        "direction": {"type": "string", "description": "Where to."},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["direction"],
}


class Client:
    """A server whose episodes have two steps."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answers: list[Any] = []

    def reset(self, **given: Any) -> Any:
        self.asked.append(given)
        self.answers = [({"seen": "wall"}, 0.5, False), ({"seen": "door", "x": 1}, None, True)]
        return SimpleNamespace(observation={"seen": "start", "done": False, "reward": None}, reward=None, done=False)

    def step(self, action: Any) -> Any:
        self.asked.append(action)
        if action.get("direction") == "up":
            raise RuntimeError("Server error: no such direction")
        if action.get("direction") == "off":
            raise ConnectionError("gone")
        observation, reward, done = self.answers.pop(0)
        return SimpleNamespace(observation=observation, reward=reward, done=done)

    def close(self) -> None: ...


def session(client: Any) -> Any:
    own = {"base_url": "http://x", "_connect": staticmethod(lambda: client), "step": openenv._stepping(SCHEMA)}
    return type("Moves", (OpenEnvSession,), own)()


def test_the_fields_of_an_action_are_the_arguments_of_a_tool() -> None:
    function = get_json_schema(session(Client()).step)["function"]
    assert (function["name"], function["parameters"]["required"]) == ("step", ["direction"])
    fields = function["parameters"]["properties"]
    types = {"direction": "string", "times": "integer", "note": "string"}
    assert {name: about["type"] for name, about in fields.items()} == types
    assert fields["times"]["description"] == "How often. At least once."


def test_an_episode_sums_its_rewards_and_ends() -> None:
    client = Client()
    environment = session(client)
    assert environment.reset(reset={"seed": 3, "level": None}, prompt="x") == "start"
    assert environment.step(direction="left") == "wall"
    with pytest.raises(ValueError, match="no such direction"):
        environment.step(direction="up")
    assert environment.step(direction="left", times=2) == '{"seen": "door", "x": 1}'
    with pytest.raises(ValueError, match="The episode has ended"):
        environment.step(direction="left")
    assert environment.get_reward() == 0.5
    assert client.asked == [{"seed": 3}, {"direction": "left"}, {"direction": "up"}, {"direction": "left", "times": 2}]
    environment.reset()
    assert environment.get_reward() == 0.0


def test_a_server_that_is_lost_is_no_reward() -> None:
    environment = session(Client())
    environment.reset()
    with pytest.raises(PeerDiedError, match="max_concurrent_envs"):
        environment.step(direction="off")
    with pytest.raises(PeerDiedError):
        environment.get_reward()
    environment.reset()
    assert environment.get_reward() == 0.0


def test_a_field_that_python_cannot_name_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the field 'x-y'"):
        openenv._stepping({"properties": {"x-y": {"type": "string"}}})


def test_content_blocks_of_a_listed_tool_are_their_text() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "image"}]
    assert openenv._returned({"content": blocks}) == "a\n<image>"
    with pytest.raises(ValueError, match="a"):
        openenv._returned({"content": blocks, "isError": True})
    assert openenv._returned({"price": 3}) == "3"
