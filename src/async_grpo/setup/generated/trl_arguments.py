"""The arguments of `trl grpo`, a YAML file or flags, as a setup file. Needs no torch: what is wrong is refused at once.

The setup file names the YAML file; it does not copy it, as that may have secrets (`env`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from async_grpo.errors import UsageError
from async_grpo.redaction import Redactor
from async_grpo.rundir.paths import RunState
from async_grpo.rundir.plan import TRLCall
from async_grpo.setup.generated import write_setup_file
from async_grpo.setup.generated.trl_flags import argument_types, in_full, what_it_is
from async_grpo.setup.grpo_config.values import COMMIT

CONFIG = "--config"
_REFUSED = {"resume_from_checkpoint": "--resume continues a run, from its newest checkpoint. Leave it out."}
_REFUSED_FLAGS = {
    "hub_token": "run.json keeps the arguments, and a token is a secret: set HF_TOKEN in the environment."
}
_redact = Redactor()

_TEXT = '''"""The setup file that `async-grpo` wrote for the arguments of `trl grpo`."""

from async_grpo.setup.generated.trl_command import TRLCommand

get_trainer = TRLCommand(
    {arguments},
    directory={directory!r},
).trainer
'''


class TRLArguments(TRLCall):
    """The setup file for what `trl grpo` would be called with."""

    __slots__ = ()

    @classmethod
    def here(cls, config: Path | None, flags: Sequence[str] = ()) -> TRLArguments:
        """The arguments of a command that is given in this folder, with or without a YAML file.

        Raises:
            UsageError: the file, one of its keys or a flag cannot be used.
        """
        named = [] if config is None else [CONFIG, str(config.absolute())]
        _check_flags(flags)
        environment_of(named)
        return cls([*named, *flags], str(Path.cwd()))

    @classmethod
    def of_run(cls, state: RunState) -> TRLArguments | None:
        """Those that a run was begun with; None: it has a setup file of its own."""
        return None if (kept := state.plan.trl) is None else cls(kept.arguments, kept.directory)

    @property
    def config(self) -> Path | None:
        return Path(self.arguments[1]) if self.arguments[:1] == [CONFIG] else None

    def names(self, config: Path) -> bool:
        """Whether this is their YAML file, however it is spelled."""
        return self.config is not None and self.config.resolve() == config.resolve()

    def write(self) -> Path:
        """The setup file."""
        lines = "".join(f"        {argument!r},\n" for argument in self.arguments)
        name = "trl_grpo" if self.config is None else f"trl_{self.config.stem}"
        return write_setup_file(name, _TEXT.format(arguments=f"[\n{lines}    ]", directory=self.directory))


def is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def setup_file(path: Path) -> Path:
    """The setup file for what a command was given: for a YAML file of TRL one that is written, else the file itself.

    Sets what the YAML file has under `env`.
    """
    if not is_yaml(path):
        return path
    trl = TRLArguments.here(path)
    set_environment(trl.arguments)
    return trl.write()


def setup_file_of_run(state: RunState) -> Path:
    """The setup file of a run, written again if the user's cache has lost it."""
    path, trl = state.plan.config, TRLArguments.of_run(state)
    return path if trl is None or path.is_file() else trl.write()


def set_environment(arguments: Sequence[str]) -> None:
    """Set what the YAML file has under `env`, as TRL's parser does, before devices are chosen and torch is imported."""
    os.environ.update(environment_of(arguments))


def environment_of(arguments: Sequence[str]) -> dict[str, str]:
    """What the YAML file of these arguments has under `env`, if they name one."""
    return environment(Path(arguments[1])) if arguments[:1] == [CONFIG] else {}


def environment(path: Path) -> dict[str, str]:
    """What a YAML file has under `env`.

    Raises:
        UsageError: the file cannot be used; in TRL's own words where TRL refuses it, too.
    """
    import yaml

    if not path.is_file():
        raise UsageError(f"Setup file not found: {path}\nGive a YAML file of `trl grpo`, or a Python file.")
    try:
        config = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError) as error:  # a date that there is not
        raise UsageError(f"{path} is not valid YAML: {_place_and_problem(error)}") from None
    except RecursionError:
        raise UsageError(f"{path} is not valid YAML: it is nested too deeply.") from None
    if not isinstance(config, dict):
        raise UsageError(f"Config file {path} must contain a YAML mapping.")
    env = config.pop("env", {})
    if not isinstance(env, dict):
        raise UsageError("`env` field should be a dict in the YAML file.")
    for name, value in config.items():
        if name not in argument_types():
            raise UsageError(f"{path}: {unrecognized([str(name)])}")
        if name in _REFUSED and value:
            raise UsageError(f"{path}: {name}: {_REFUSED[name]}")
    if lists := [name for name, value in env.items() if isinstance(value, (list, dict))]:  # of aliases: without an end
        raise UsageError(f"{path}: env: {lists[0]} has a list or a mapping. Give a text, a number, true or false.")
    return {str(name): str(value) for name, value in env.items()}


def _place_and_problem(error: Any) -> str:
    """Place and problem of yaml's error. Its own text quotes the line, which may have a secret (`env`, `hub_token`)."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return _redact(f"{place}{problem or error}")


def unrecognized(names: Iterable[str]) -> str:
    """`unrecognized arguments: --learning_rat. Did you mean learning_rate?`, in the words of TRL's command."""
    names = list(names)
    first = names[0].removeprefix("--").partition("=")[0]
    if reason := what_it_is(first.replace("-", "_")):
        hint = f"{reason}."
    else:
        near = get_close_matches(first, argument_types(), n=1)
        hint = f". Did you mean {near[0]}?" if near else ""
    return f"unrecognized arguments: {' '.join(f'--{name}' for name in [first, *names[1:]])}{hint}"


def _check_flags(flags: Sequence[str]) -> None:
    for name, value in _named(flags):
        if reason := {**_REFUSED, **_REFUSED_FLAGS}.get(name):
            raise UsageError(f"--{name}: {reason}")
        given = f"{name}={COMMIT.sub('commit', value)}"
        if _redact(given) != given:
            raise UsageError(
                f"--{name}: run.json keeps the arguments, and this one looks like a secret. Set it in the environment, "
                "or write it into a YAML file."
            )


def _named(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and value of each flag; of a list each value on its own."""
    name = ""
    for text in flags:
        if text.startswith("--"):
            given, equals, value = text[2:].partition("=")
            name = in_full(given.replace("-", "_"))
            if not equals:
                yield name, ""
                continue
        else:
            value = text
        yield name, value
