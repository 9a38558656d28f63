"""A verifiers environment: its tasks as a dataset, its episodes as rollouts, its scores as rewards."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.agent import Segment
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.state import state_cls
from verifiers.v1.types import ToolCall, ToolMessage
from verifiers.v1.utils.decorators import invoke
from verifiers.v1.utils.loaders import load_environment as load
from verifiers.v1.utils.loaders import resolve_env_config

from async_grpo.envs.conversations import Conversation, Lockstep, Message, rollout_output
from async_grpo.envs.verifiers.refusals import refuse_environment, refuse_task, refuse_toolset
from async_grpo.errors import UnsupportedError, UsageError

TASK = "task"  # the key of a prompt's last message that names the task
COLUMN = "verifiers"  # what an episode earned, for the reward function
MOST_TEXT = 65_536  # characters of a result; of a longer one, the model reads the beginning
SHOWN = 2_000
_STATE: ContextVar[vf.State] = ContextVar("state of the episode")


def load_environment(config: str | Mapping[str, Any], *, limit: int | None = None) -> VerifiersEnvironment:
    """Load an environment as `verifiers` does.

    Args:
        config: the id of a taskset, or what `[env]` holds in the configuration of verifiers.
        limit: how many tasks to take.

    Raises:
        UsageError: there are no tasks, or two of them are alike, or they never end.
        UnsupportedError: the environment needs what a rollout here cannot give.
    """
    given = {"taskset": {"id": config}} if isinstance(config, str) else dict(config)
    return VerifiersEnvironment(load(resolve_env_config(given)), limit)


class VerifiersEnvironment:
    """`dataset`, `rollout` and `reward` are arguments of TRL's trainer."""

    def __init__(self, environment: vf.Env, limit: int | None = None) -> None:
        from datasets import Dataset

        refuse_environment(environment)
        if limit is None and not environment.taskset.bounded:
            raise UsageError(f"The taskset {environment.config.env_id} never ends: give load_environment a `limit`.")
        tasks = list(islice(environment.taskset, limit))
        if not tasks:
            raise UsageError(f"The taskset {environment.config.env_id} has no tasks.")
        refuse_task(tasks[0])
        self._environment = environment
        self._tasks = {task.key: task for task in tasks}
        if len(self._tasks) < len(tasks):
            (key, count), *_ = Counter(task.key for task in tasks).most_common(1)
            raise UsageError(f"{count} tasks have the same key {key!r}; their class must give each its own (Task.key).")
        self.dataset = Dataset.from_list([{"prompt": _prompt(task)} for task in tasks])

    def rollout(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: play the task of each prompt once."""
        lockstep = Lockstep(trainer)
        toolsets = Toolsets(self._environment)
        tasks = [self._task_of(prompt) for prompt in prompts]
        conversations = [Conversation(trainer, lockstep) for _ in tasks]
        episodes = [play(self._environment, *one, toolsets) for one in zip(tasks, conversations, strict=True)]
        played: list[Played] = lockstep.run(episodes)
        return {
            **rollout_output(conversations),
            COLUMN: [{"rewards": one.rewards, "metrics": one.metrics} for one in played],
        }

    def reward(self, completions: Sequence[Any], *, log_metric: Any = None, **columns: Any) -> list[float]:
        """The sum of an episode's weighted rewards; each of them, and each metric, is logged by its name."""
        earned: Sequence[Mapping[str, Mapping[str, float]]] = columns[COLUMN]
        if log_metric is not None:
            for kind in ("rewards", "metrics"):
                for name in sorted({name for one in earned for name in one[kind]}):
                    values = [one[kind][name] for one in earned if name in one[kind]]
                    log_metric(f"verifiers/{kind}/{name}", sum(values) / len(values))
        return [math.fsum(one["rewards"].values()) for one in earned]

    def _task_of(self, prompt: Any) -> vf.Task:
        key = prompt[-1].get(TASK) if isinstance(prompt, list) and prompt else None
        if key not in self._tasks:
            raise UsageError(
                f"A prompt names the task {key!r}, which this environment does not have. train_dataset must be "
                "`environment.dataset`, and the taskset must give the same tasks in every process."
            )
        return self._tasks[key]


def _prompt(task: vf.Task) -> list[dict[str, Any]]:
    """What the model reads first, as far as the task says it: some open the conversation when they are played."""
    messages = messages_of(task) or [{"role": "user", "content": ""}]
    return [*messages[:-1], {**messages[-1], TASK: task.key}]


@dataclass(frozen=True, slots=True)
class Played:
    """What an episode came to."""

    rewards: dict[str, float]  # weighted
    metrics: dict[str, float]


async def play(environment: vf.Env, task: vf.Task, conversation: Conversation, toolsets: Toolsets) -> Played:
    """Play the task once, and score it. Raises what the environment raises."""
    [(name, config)] = agent_config_fields(environment.config).items()
    seat = Seat(config, conversation, toolsets)
    episode = vf.Episode(env=vf.EnvInfo(id=environment.config.env_id), task=_recorded(task))
    agents: Any = vf.Agents(environment.config, lambda *_: seat)
    await environment.setup(agents)
    await environment.run(task, agents)
    if seat.trace is None or not conversation.transcript.turns:
        raise UnsupportedError(
            f"{type(environment).__name__}.run ended without asking the agent {name} for anything, so there is no "
            "completion to train on."
        )
    episode.traces.append(seat.trace)
    episode.ok = True
    await environment.finalize(task, episode)
    return Played(
        {name: reward.value for name, reward in seat.trace.rewards.items() if reward is not None},
        {name: value for name, value in seat.trace.metrics.items() if value is not None},
    )


class Seat:
    """In the place of verifiers' `Agent`: the model that is trained."""

    def __init__(self, config: vf.AgentConfig, conversation: Conversation, toolsets: Toolsets) -> None:
        self.config = config
        self.trainable = True
        self.trace: vf.Trace | None = None
        self._conversation, self._toolsets = conversation, toolsets

    async def run(self, task: vf.Task, **others: Any) -> vf.Trace:
        async with self.interaction(task, **others) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **others: Any) -> AsyncIterator[Exchange]:
        if others or self.trace is not None:
            what = f"it passes {', '.join(others)}" if others else "it plays the agent twice"
            raise UnsupportedError(
                f"The environment's run() cannot be followed here: {what}. One completion is one "
                "conversation of the agent."
            )
        trace = self.trace = vf.Trace(
            task=_recorded(task), state=state_cls(type(task))(), agent=vf.AgentInfo(config=self.config)
        )
        tools = await self._toolsets.of(task, trace.state)
        self._conversation.offer(tools.schemas)
        await invoke(task.setup, {"trace": trace, "runtime": None})
        exchange = Exchange(trace, self._conversation, tools, self.config.max_turns)
        exchange.hear(messages_of(task))
        yield exchange
        trace.stop("user_closed")
        trace.ok = True
        await invoke(task.finalize, {"trace": trace, "runtime": None})
        await task.score(trace)

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"The environment's run() uses Agent.{name}, which there is not here: run and interaction are."
        )


class Exchange:
    """In the place of verifiers' `Interaction`."""

    def __init__(self, trace: vf.Trace, conversation: Conversation, tools: Toolset, max_turns: int | None) -> None:
        self.trace = trace
        self._conversation, self._tools = conversation, tools
        self._max_turns = max_turns

    def hear(self, messages: Sequence[Message]) -> bool:
        heard = self._conversation.hear(messages) if messages else True
        for message in messages if heard else ():
            kind = {"system": vf.SystemMessage, "user": vf.UserMessage}.get(message["role"])
            self._record(kind(content=message["content"]) if kind else vf.AssistantMessage(content=message["content"]))
        return heard

    async def turn(self, message: Any = None) -> Segment:
        """What the model answers, after the tools that it called; a segment that is `terminated` has no message."""
        said = [message] if isinstance(message, str) else message or []
        if self._ended() or not self.hear([_plain(each) for each in said]):
            self.trace.stop("max_output_tokens")
            return Segment(messages=[], terminated=True)
        segment: list[Any] = []
        while True:
            reply = await self._conversation.reply()
            calls = reply.get("tool_calls") or []
            segment.append(self._record(_assistant(reply), sampled=True))
            if not calls or self._ended():
                return Segment(messages=segment)
            results = [await self._tools.call(call) for call in calls]
            read = [{"role": "tool", "name": name, "content": text} for name, text in results]
            if not self._conversation.hear(read):
                return Segment(messages=segment)
            for index, (name, text) in enumerate(results):
                segment.append(self._record(ToolMessage(tool_call_id=f"call_{index}", name=name, content=text)))

    def __getattr__(self, name: str) -> NoReturn:
        raise UnsupportedError(
            f"The environment's run() uses Interaction.{name}, which there is not here: turn and trace are."
        )

    def _ended(self) -> bool:
        return self._max_turns is not None and self.trace.num_turns >= self._max_turns

    def _record(self, message: Any, *, sampled: bool = False) -> Any:
        nodes = self.trace.nodes
        nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))
        return message


def messages_of(task: vf.Task) -> list[Message]:
    """What the task itself says at the beginning; empty where the conversation is opened by others."""
    data = task.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    asked = [data.prompt] if isinstance(data.prompt, str) else data.prompt or []
    return [*system, *map(_plain, asked)]


def _plain(message: Any) -> Message:
    """A message for a chat template: text only."""
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message.content, str) or message.role == "tool":
        raise UnsupportedError(
            f"A message of the environment is of the role {message.role} with "
            f"{'text' if isinstance(message.content, str) else 'parts that are not text'}: only texts of the system, "
            "of a user and of the assistant can be read here."
        )
    return {"role": message.role, "content": message.content}


def _assistant(reply: Message) -> vf.AssistantMessage:
    calls = []
    for index, call in enumerate(reply.get("tool_calls") or []):
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        calls.append(ToolCall(id=f"call_{index}", name=str(function.get("name")), arguments=json.dumps(arguments)))
    return vf.AssistantMessage(
        content=reply.get("content"), reasoning_content=reply.get("reasoning_content"), tool_calls=calls or None
    )


def _recorded(task: vf.Task) -> vf.TraceTask:
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


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
