"""What lies in an experiment's folder: which stages are finished, which are not any more, and what follows for jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import BadFileError, UsageError
from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config import ExperimentConfig
from async_grpo_experiments.runner.graph import Stage, below, graph_of, keys_of
from async_grpo_experiments.slots.ledger import BLOCKED, FAILED, Record

NOT_STARTED = "NOT_STARTED"
_DONE = {"generate": "DATA_GENERATED", "train": "MODEL_TRAINED", "evaluate": "EVAL_COMPLETED"}


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What lies in an experiment's folder.

    Attributes:
        done: digests of the stages whose folders hold, by name.
        redo: why a stage that was finished is not any more, by name.
        changed: how the configuration differs from that of a finished stage, by name.
    """

    done: dict[str, str]
    redo: dict[str, str]
    changed: dict[str, list[str]]


def look(root: Path, config: ExperimentConfig) -> OnDisk:
    """Verify what every stage has left. What was made of something that does not hold does not hold either."""
    graph = graph_of(config)
    done: dict[str, str] = {}
    redo: dict[str, str] = {}
    changed: dict[str, list[str]] = {}
    for name, stage in graph.items():
        try:
            manifest = states.manifest_of(root / stage.folder)
            if manifest is None:
                continue
            why = states.damage(root / stage.folder, manifest)
        except BadFileError as error:
            redo[name] = str(error)
            continue
        if lost := next((need for need in stage.needs if done.get(need) != manifest.inputs.get(need)), ""):
            why = why or f"it was made of {lost}, which is not there as it was"
        if why:
            redo[name] = why
        elif found := states.differences(manifest.keys, json.loads(json.dumps(keys_of(config, stage)))):
            changed[name] = found
        else:
            done[name] = states.digest(manifest)
    return OnDisk(done, redo, changed)


def state_of(stages: Sequence[Stage], done: Collection[str], records: Mapping[str, Record]) -> str:
    """The state of a job with these stages: how far its folders hold, or why it goes no further."""
    reached = NOT_STARTED
    for stage in stages:
        record = records.get(stage.name)
        if stage.name in done:
            reached = _DONE[stage.kind]
        elif record is not None and record.state == FAILED:
            return "FAILED"
        elif record is not None and record.state == BLOCKED:
            return f"BLOCKED ({record.why})"
    return reached


def refuse_changes(root: Path, found: OnDisk, graph: Mapping[str, Stage]) -> None:
    """`UsageError` where a finished stage was made with other keys: the difference, and the jobs that it touches."""
    if not found.changed:
        return
    name, first = next(iter(found.changed.items()))
    jobs = sorted({graph[one].job.id for one in below(graph, found.changed)})
    raise UsageError(
        f"{name} is finished, and was made with other keys ({'; '.join(first)}). This touches {', '.join(jobs)}. Give "
        f"the same values, start another experiment, or delete the folders of these jobs in {root / 'jobs'}."
    )


def move_aside(root: Path, graph: Mapping[str, Stage], found: OnDisk, say: Callable[[str], None]) -> None:
    """Make room for what is made again, and say what and why."""
    for name, why in found.redo.items():
        say(f"{name} is made again: {why}. What was there is in {states.move_aside(root / graph[name].folder)}.")
