"""Which job starts first, among those that can: by default the one with the longest chain behind it.

scheduling.priority=package.module:function has another one, with the same arguments as `estimate_job_priority`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeAlias

from async_grpo.errors import UsageError
from async_grpo_experiments.runner.config import ExperimentConfig
from async_grpo_experiments.runner.graph import ExperimentJob, Stage

JobPriority: TypeAlias = Callable[[ExperimentJob, ExperimentConfig], int]


def estimate_job_priority(job: ExperimentJob, cfg: ExperimentConfig) -> int:
    """Stages that are left of the job's line from this round on; higher ones start first."""
    return 1 if not job.algo else 2 * (cfg.rounds_of_training - job.round) + 3


def chains_left(graph: Mapping[str, Stage], seconds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """The longest chain from each stage on, by its name.

    Args:
        seconds: means of earlier stages, by algorithm and kind; without any, stages count 1 each.
    """
    known = sum(seconds.values()) / len(seconds) if seconds else 1.0
    behind = dict.fromkeys(graph, 0.0)  # what needs a stage comes after it
    found: dict[str, float] = {}
    for stage in reversed([*graph.values()]):
        found[stage.name] = seconds.get((stage.job.algo, stage.kind), known) + behind[stage.name]
        for need in stage.needs:
            behind[need] = max(behind[need], found[stage.name])
    return found


def named(name: str) -> JobPriority:
    """The function `package.module:function`. `UsageError` if there is none."""
    module, _, function = name.partition(":")
    try:
        found: JobPriority = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"scheduling.priority {name!r} cannot be loaded: {error}. Give package.module:function."
        ) from error
    return found
