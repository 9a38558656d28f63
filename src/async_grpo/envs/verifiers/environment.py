"""A verifiers environment: its tasks as a dataset, its episodes as rollouts, its scores as rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment as load
from verifiers.v1.utils.loaders import resolve_env_config

from async_grpo.envs.conversations import Conversation, Lockstep, rollout_output
from async_grpo.envs.verifiers.played_task import Played, messages_of, play
from async_grpo.envs.verifiers.refusals import refuse_environment, refuse_task
from async_grpo.envs.verifiers.toolsets import Toolsets
from async_grpo.errors import UsageError

TASK = "task"  # the key of a prompt's last message that names the task
COLUMN = "verifiers"  # what an episode earned, for the reward function


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
        conversations: list[Conversation] = []
        episodes = []
        for prompt in prompts:
            task = self._task_of(prompt)
            conversation = Conversation(trainer, lockstep)
            conversations.append(conversation)
            episodes.append(play(self._environment, task, conversation, toolsets))
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
