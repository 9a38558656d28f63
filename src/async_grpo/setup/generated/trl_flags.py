"""The arguments of `trl grpo`: their names and types, read from TRL's sources, and which of a command line they are.

Importing TRL takes seconds, and a misspelled name is to be refused at once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from async_grpo.setup.grpo_config.values import SOURCES, alternatives, annotations_in

_SOURCES = (
    ("trl", "scripts/utils.py", "ScriptArguments"),
    ("trl", "scripts/grpo.py", "GRPOScriptArguments"),
    *SOURCES,
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("trl", "scripts/utils.py", "DatasetMixtureConfig"),
)
"""What the parser of `trl grpo` is made of; tests/integration/test_trl_command.py compares with that parser."""

_ACCELERATE = (
    *("accelerate_config", "config_file", "num_processes", "num_machines", "machine_rank", "gpu_ids", "multi_gpu"),
    *("main_process_ip", "main_process_port", "mixed_precision", "use_fsdp", "use_deepspeed", "dynamo_backend", "cpu"),
)
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # what argparse takes for a number, not for a flag
_TRUTHS = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0")


class Split(NamedTuple):
    """The parts of a command line."""

    trl: list[str]  # flags of `trl grpo`, with their values
    rest: list[str]


@functools.cache
def argument_types() -> dict[str, str]:
    """The annotation of each argument."""
    return {name: kind for name, kind in annotations_in(_SOURCES).items() if not name.startswith("_")}


def split(arguments: Sequence[str], ours: Collection[str]) -> Split:
    """Take TRL's flags and their values out of a command line. `ours` are flags that are never TRL's."""
    found, left = Split([], []), list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        if name == "--config":  # as TRL's command names the YAML file
            found.rest.extend([value] if equals else [])
            continue
        if argument == "--":
            found.rest.extend([argument, *left])
            break
        if not name.startswith("--") or name.replace("_", "-") in ours or (kind := _kind(name, ours)) is None:
            found.rest.append(argument)
            continue
        values = 0 if equals else _values(kind, left)
        found.trl.extend([argument, *left[:values]])
        del left[:values]
    return found


def _kind(flag: str, ours: Collection[str]) -> str | None:
    """The annotation of the argument that TRL's parser takes `flag` for; None: of none."""
    name, types = flag[2:].replace("-", "_"), argument_types()
    if name in types:
        return types[name]
    if name.startswith("no_") and "bool" in types.get(name[3:], ""):
        return "False"
    if any(option.startswith(flag.replace("_", "-")) for option in ours):  # short for one of ours
        return None
    return types.get(in_full(name))


def in_full(name: str) -> str:
    """The argument that TRL's parser takes `name` for, which may be its beginning; else `name` itself."""
    types = argument_types()
    return name if name in types else next((other for other in types if other.startswith(name)), name)


def _values(kind: str, following: Sequence[str]) -> int:
    """How many of the arguments that follow are the flag's."""
    if kind == "False" or not following:
        return 0
    types = alternatives(kind)
    if "bool" in types:
        return int(following[0].lower() in _TRUTHS)
    if "list" not in types:
        return 1
    ends = (place for place, text in enumerate(following) if text.startswith("-") and not _NEGATIVE.fullmatch(text))
    return next(ends, len(following))


def what_it_is(name: str) -> str:
    """Why an argument that TRL's parser does not know is refused, where we know what it is."""
    if name not in _ACCELERATE:
        return ""
    return (
        ". `trl grpo` passes it on to `accelerate launch`. Here the launcher starts all processes: see "
        "--accelerate-config FILE, --num-workers and --worker-device-ids"
    )
