"""The arguments of `trl grpo`, a YAML file or flags, as a setup file; and the trainer that TRL builds for them.

TRL's own code parses them and builds the trainer: `trl.scripts.grpo`, up to the trainer. What needs no TRL is refused
before it is imported, as importing it takes seconds. The setup file names the YAML file; it does not copy it, as that
may have secrets (`env`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import chdir
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from async_grpo.errors import AsyncGRPOError, SetupFileError, UsageError
from async_grpo.redaction import Redactor
from async_grpo.rundir.paths import RunState
from async_grpo.rundir.run_plan import TRLCall
from async_grpo.settings import DECLARED
from async_grpo.setup.generated import write_setup_file
from async_grpo.setup.grpo_config.values import looks_secret
from async_grpo.setup.replaced import instead

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import GRPOTrainer

_END = "async_grpo_at_the_end"  # attribute of the trainer: what TRL's command does when the training is over
CONFIG = "--config"
_REFUSED = {
    "resume_from_checkpoint": "--resume continues a run, from its newest checkpoint. Leave it out.",
    "hub_token": "run.json keeps the arguments, and a token is a secret: set HF_TOKEN in the environment.",
}
_redact = Redactor()

_TEXT = '''"""The setup file that `async-grpo` wrote for the arguments of `trl grpo`."""

from async_grpo.setup.generated.trl_command import TRLCommand

get_trainer = TRLCommand({arguments!r}, directory={directory!r}).trainer
'''


def called_here(config: Path | None, flags: Sequence[str] = ()) -> TRLCall:
    """A command that is given in this folder, with or without a YAML file. Sets what the file has under `env`.

    Raises:
        UsageError: the file or a flag cannot be used, as far as can be said without TRL.
    """
    named = [] if config is None else [CONFIG, str(config.absolute())]
    _check_flags(flags)
    set_environment(named)
    return TRLCall([*named, *flags], str(Path.cwd()))


def is_called_with(call: TRLCall, file: Path) -> bool:
    """Whether it names this YAML file, however it is spelled."""
    return (named := _yaml_file(call.arguments)) is not None and named.resolve() == file.resolve()


def write(call: TRLCall) -> Path:
    name = "trl_grpo" if (file := _yaml_file(call.arguments)) is None else f"trl_{file.stem}"
    return write_setup_file(name, _TEXT.format(arguments=call.arguments, directory=call.directory))


def is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def setup_file(path: Path) -> Path:
    """The setup file for what a command was given: for a YAML file of TRL one that is written, else the file itself."""
    return write(called_here(path)) if is_yaml(path) else path


def setup_file_of_run(state: RunState) -> Path:
    """The setup file of a run, written again if the user's cache has lost it."""
    path, call = state.plan.config, state.plan.trl
    return path if call is None or path.is_file() else write(call)


def set_environment(arguments: Sequence[str]) -> None:
    """Set what the YAML file has under `env`, as TRL's parser does, before devices are chosen and torch is imported."""
    os.environ.update(_read(arguments)["env"])


def _read(arguments: Sequence[str]) -> dict[str, Any]:
    return {"env": {}} if (file := _yaml_file(arguments)) is None else contents(file)


def _yaml_file(arguments: Sequence[str]) -> Path | None:
    return Path(arguments[1]) if arguments[:1] == [CONFIG] else None


def contents(path: Path) -> dict[str, Any]:
    """What a YAML file says; all that it has under `env` as texts.

    Raises:
        UsageError: the file cannot be used. What TRL refuses as well is said in its words.
    """
    import yaml

    if not path.is_file():
        raise UsageError(f"Setup file not found: {path}\nGive a YAML file of `trl grpo`, or a Python file.")
    try:
        config = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that there is not
        raise UsageError(f"{path} is not valid YAML: {_line_and_problem(error)}") from None
    if not isinstance(config, dict):
        raise UsageError(f"Config file {path} must contain a YAML mapping.")
    env = config.get("env", {})
    if not isinstance(env, dict):
        raise UsageError("`env` field should be a dict in the YAML file.")
    if config.get("resume_from_checkpoint"):
        raise UsageError(f"{path}: resume_from_checkpoint: {_REFUSED['resume_from_checkpoint']}")
    if lists := [name for name, value in env.items() if isinstance(value, (list, dict))]:  # of aliases: without an end
        raise UsageError(f"{path}: env: {lists[0]} has a list or a mapping. Give a text, a number, true or false.")
    return {**config, "env": {str(name): str(value) for name, value in env.items()}}


def _line_and_problem(error: Any) -> str:
    """Line and problem of yaml's error. Its own text quotes the line, which may have a secret (`env`, `hub_token`)."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return _redact(f"{where}{problem or error}")


def _check_flags(flags: Sequence[str]) -> None:
    name = ""
    for text in flags:
        given, _, value = text[2:].partition("=") if text.startswith("--") else (name, "", text)
        name = given.replace("-", "_")
        for refused, reason in _REFUSED.items():
            if name and refused.startswith(name):  # TRL's parser takes the beginning of a name for it
                raise UsageError(f"--{refused}: {reason}")
        if looks_secret(name, value):
            raise UsageError(
                f"--{name}: run.json keeps the arguments, and this one looks like a secret. Set it in the environment, "
                "or write it into a YAML file."
            )


class TRLCommand:
    """`trl grpo` with these arguments, given in `directory`.

    Raises:
        UsageError: the YAML file cannot be used.
    """

    def __init__(self, arguments: Sequence[str], directory: str) -> None:
        self._arguments, self._directory = list(arguments), directory
        for name, value in _read(arguments)["env"].items():
            os.environ.setdefault(name, value)  # the launcher decides

    def trainer(self) -> GRPOTrainer:
        """Build the trainer, and let its training end as TRL's command ends.

        Raises:
            UsageError: TRL's parser, or a configuration that it makes, refuses the arguments.
        """
        with chdir(self._directory if Path(self._directory).is_dir() else "."):  # for what is relative
            from trl.scripts import grpo

            parsed = self._parsed(grpo)
            trainer = _built_by(grpo.main, parsed)
        trainer.add_callback(_end_as_trl_does(trainer, parsed[0].dataset_name))
        return trainer

    def _parsed(self, grpo: Any) -> list[Any]:
        """Script, GRPO, model and dataset arguments. As `TrlParser.parse_args_and_config`, but unknown names first."""

        def refuse(message: str) -> NoReturn:
            raise UsageError(f"trl grpo: error: {message}")

        parser = grpo.make_parser(prog="trl grpo")
        parser.error = refuse
        config, file = _read(self._arguments), _yaml_file(self._arguments)
        del config["env"]
        flags = self._arguments if file is None else self._arguments[2:]
        names = [action.dest for action in parser._actions]
        try:
            if unknown := parser.set_defaults_with_config(**config):
                refuse(_unrecognized(unknown[0], names))
            if unknown := parser.parse_known_args(flags)[1]:
                refuse(_unrecognized(unknown[0], [*names, *DECLARED, "distributed"]))
            return list(parser.parse_args_into_dataclasses(flags))
        except AsyncGRPOError:
            raise
        except (TypeError, ValueError) as error:  # TypeError: a key of the YAML file is no text
            raise UsageError(f"trl grpo: error: {error}") from error


def _unrecognized(argument: str, known: Sequence[str]) -> str:
    """`unrecognized arguments: --learning_rat. Did you mean learning_rate?`, in the words of TRL's command."""
    from accelerate.commands.launch import launch_command_parser

    flag = argument.partition("=")[0]
    name = flag.removeprefix("--").replace("-", "_")
    hint = f" Did you mean {near[0]}?" if (near := get_close_matches(name, known, n=1)) else ""
    if name == "accelerate_config" or flag in launch_command_parser()._option_string_actions:
        hint = (
            " `trl grpo` passes it on to `accelerate launch`. Here the launcher starts all processes: see "
            "--accelerate-config FILE, --num-workers and --worker-device-ids."
        )
    return f"unrecognized arguments: {flag}.{hint}"


class _Built(BaseException):
    """Ends TRL's `main` where it has made its trainer."""


def _built_by(main: Any, parsed: Sequence[Any]) -> GRPOTrainer:
    import trl

    trainer_class = trl.GRPOTrainer

    def build(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Built(trainer_class(*args, **kwargs))

    try:
        with instead(trl, GRPOTrainer=build):
            main(*parsed)
    except _Built as built:
        return built.args[0]
    raise SetupFileError(
        "TRL's command has made no trainer: this version of TRL builds it in another way. Install the tested version "
        "(`async-grpo doctor` names it), or write a setup file: async-grpo init my_trainer.py."
    )


def end_as_trl_does(trainer: GRPOTrainer) -> None:
    """What is still to do where a resumed run has done its steps already: it was killed before it had done it."""
    end = getattr(trainer, _END, None)  # of a setup file of the user's own: nothing
    if end is not None:
        end()


def _end_as_trl_does(trainer: GRPOTrainer, dataset_name: str | None) -> TrainerCallback:
    from transformers import TrainerCallback

    def end() -> None:
        """What TRL's `main` does after the training: the model goes into `output_dir`, and to the Hub if asked."""
        trainer.save_model(trainer.args.output_dir)
        trainer.accelerator.print(f"model saved to {trainer.args.output_dir}")
        if trainer.args.push_to_hub:
            trainer.push_to_hub(dataset_name=dataset_name)

    class SavesTheModel(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step >= state.max_steps:  # else it was stopped: --resume goes on
                end()

    setattr(trainer, _END, end)
    return SavesTheModel()
