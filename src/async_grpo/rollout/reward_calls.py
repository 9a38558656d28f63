"""How a worker may call the reward functions: how many calls at a time, and how many completions in one of them.

TRL calls them one at a time, with a batch. A function says by attributes what else it takes: `thread_safe = True`,
several calls at a time; `joint = False`, no call with more than one prompt group. An override of TRL's scoring calls
them, and is asked as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trl.trainer.utils import is_async_callable

from async_grpo.settings import WorkerSettings

OVERLAPPING = 4  # calls at a time, where the reward functions allow several and no option says how many


@dataclass(frozen=True, slots=True)
class RewardCalls:
    """Calls of all reward functions of a trainer together."""

    at_a_time: int  # 0: in the caller's thread
    most_completions: int  # of a call with several groups; 0: a call is for one group


def reward_calls(trainer: Any, settings: WorkerSettings, *, deterministic: bool) -> RewardCalls:
    """As the functions and the options say. Rewards in another order may draw other random numbers."""
    functions = [*trainer.reward_funcs, *_own_scoring(trainer)]
    overlap = all(is_async_callable(function) or _says(function, "thread_safe", False) for function in functions)
    at_a_time = settings.score_concurrency or (OVERLAPPING if overlap else 1)
    joint = not settings.score_alone and all(_says(function, "joint", True) for function in functions)
    batch = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    return RewardCalls(0 if deterministic else at_a_time, batch if joint else 0)


def _own_scoring(trainer: Any) -> list[Any]:
    """The user's override of `_calculate_rewards`, if there is one."""
    scoring = getattr(trainer, "_calculate_rewards", None)
    return [] if scoring is None or scoring.__module__.startswith(("trl.", "async_grpo.")) else [scoring]


def _says(function: Any, name: str, default: bool) -> bool:
    while isinstance(function, partial) and name not in vars(function):
        function = function.func
    return bool(getattr(function, name, default))


def together(sizes: Sequence[int], most: int) -> int:
    """How many of the first groups, with so many completions each, one call takes: one at least."""
    taken, completions = 0, 0
    for size in sizes:
        completions += size
        if taken and completions > most:
            break
        taken += 1
    return taken
