"""The options that a run was begun with, and that `--resume` continues with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import UsageError
from async_grpo.rundir.paths import RunState
from async_grpo.settings import flag_name

_OF_THE_LOSS = ("correction", "correction_level", "correction_min", "correction_max")
FIXED = {
    "seed": "it decides the order of the prompts and what is sampled",
    "deterministic": "the run would not be the same bit for bit",
    **dict.fromkeys(_OF_THE_LOSS, "it is part of the loss that the run minimises"),
    "padding": "the run, and a replay of it, would not be the same bit for bit",
    "choose_prompts": "it decides which prompts are trained on",
    "filter_zero_variance": "it decides which groups are trained on",
    "train_of_group": "it decides which completions are trained on",
}
"""What cannot change when a run is resumed, and why."""
_EXCLUSIVE = ({"num_workers", "worker_device_ids"},)  # one of them that is given takes the place of the others


class Recalled(NamedTuple):
    """What a resumed run continues with."""

    options: dict[str, Any]  # those that the command line did not give
    changes: list[str]  # a sentence for each that it gave otherwise


def recall(state: RunState, given: Mapping[str, Any], only: Collection[str] | None = None) -> Recalled:
    """The options of the run in `state`, where the command line gave none.

    Args:
        given: the options of the command line, without its defaults.

    Raises:
        UsageError: an option that cannot change was given otherwise.
    """
    recalled = Recalled({}, [])
    replaced = {other for group in _EXCLUSIVE if group & given.keys() for other in group - given.keys()}
    for name, value in state.plan.options().items():
        if only is not None and name not in only:
            continue
        if name not in given:
            recalled.options[name] = None if name in replaced else value
        elif isinstance(given[name], dict):
            recalled.options[name] = {**(value or {}), **given[name]}
            recalled.changes.extend(_changed_values(name, given[name], value or {}))
        elif given[name] != value:
            recalled.changes.append(_changed(state, name, given[name], value))
    return recalled


def _changed(state: RunState, name: str, given: Any, kept: Any) -> str:
    now, before = _spelled(name, given), _spelled(name, kept)
    if name in FIXED:
        raise UsageError(
            f"Run {state.run_id} was begun {_how(before)}, and this cannot change: {FIXED[name]}. With --resume leave "
            f"{flag_name(name)} out, which keeps it as it was; or begin another run with --run-dir OTHER."
        )
    return f"{now or 'without ' + flag_name(name)} from now on; the run was begun {_how(before)}"


def _changed_values(option: str, given: Mapping[str, str], kept: Mapping[str, str]) -> Iterator[str]:
    for name, value in given.items():
        before = f"it was {kept[name]}" if name in kept else "the run was begun without this value"
        if kept.get(name) != value:
            yield f"{flag_name(option)} {name}={value} from now on; {before}"


def _how(flag: str) -> str:
    return f"with {flag}" if flag else "without this option"


def _spelled(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return flag_name(name) if value is True else f"{flag_name(name)} {text}"


def config_change(state: RunState, config: Path) -> list[str]:
    """A sentence where the setup file is another than the run was begun with."""
    before = state.plan.config
    return [] if config.absolute() == before else [f"the setup file is {config} from now on; it was {before}"]
