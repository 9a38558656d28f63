"""What of verifiers does not map to a rollout here, each with a sentence."""

from __future__ import annotations

import inspect
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.utils.decorators import discover_decorated

from async_grpo.errors import UnsupportedError

_TAKEN = {"harness", "max_turns"}  # settings of an agent that mean something here
_CHAT = "null"  # verifiers' harness that is a chat with the task's tools: what an episode is here


def refuse_environment(environment: vf.Env) -> None:
    """Raise `UnsupportedError` for what all episodes would need."""
    config, kind = environment.config, type(environment)
    agents = agent_config_fields(config)
    if len(agents) != 1:
        _refuse(f"{config.env_id} has {len(agents)} agents ({', '.join(agents)})", "a completion is of one model")
    for hook in ("start", "stop"):
        if getattr(kind, hook) is not getattr(vf.Env, hook):
            _refuse(f"{kind.__name__}.{hook} holds resources beside its episodes", "no process here keeps them")
    own = sorted(config.model_fields_set - {"id", "taskset", *agents})
    if own:
        _refuse(f"{config.env_id} sets {', '.join(own)}", "the worker decides when an episode runs and is tried again")
    [(name, agent)] = agents.items()
    set_here = {
        field for field in type(agent).model_fields if getattr(agent, field) != getattr(vf.AgentConfig(), field)
    }
    if set_here - _TAKEN:
        _refuse(f"the agent {name} sets {', '.join(sorted(set_here - _TAKEN))}", "the trainer samples and limits")
    harness = agent.harness.id if agent.harness is not None else default_agent_harness(config.taskset.id).id
    pinned = agent.harness is not None or harness != "bash"
    if pinned and harness != _CHAT:
        _refuse(
            f"the agent {name} is the program {harness!r}",
            f"the model plays in a chat with the task's tools, as verifiers' harness {_CHAT!r} does",
        )


def refuse_task(task: vf.Task) -> None:
    """Raise `UnsupportedError` for what tasks of this class would need."""
    kind = type(task).__name__
    if task.NEEDS_CONTAINER or task.data.image or task.data.skills:
        _refuse(f"{kind} runs in a container", "there is none")
    for hook in ("setup", "finalize"):
        if _asks_for_runtime(getattr(task, hook)) and getattr(type(task), hook) is not getattr(vf.Task, hook):
            _refuse(f"{kind}.{hook} works in a runtime of verifiers", "there is none")
    scores = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
    needy = sorted(score.__name__ for score in scores if _asks_for_runtime(score))
    if needy:
        _refuse(f"{kind} scores by {', '.join(needy)} in a runtime of verifiers", "there is none")
    hooks = [*task.hooks("stop"), *discover_decorated(task, "intercept")]
    if hooks:
        _refuse(f"{kind} has {hooks[0].__name__}, which looks at requests", "no requests are made")


def refuse_toolset(toolset: vf.Toolset) -> None:
    if getattr(toolset.config, "url", None):
        _refuse(f"{type(toolset).__name__} is a server at {toolset.config.url}", "tools are called in the worker")


def _asks_for_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _refuse(what: str, why: str) -> None:
    raise UnsupportedError(
        f"{what}, and here {why}. Take another environment, or change it where it is defined: what it asks for cannot "
        "be given, and would otherwise be left out."
    )
