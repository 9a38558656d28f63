"""`async-grpo train` as `trl grpo` is called: a YAML file, TRL's flags, or both."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from async_grpo.cli.parser import Parser
from async_grpo.rundir.paths import RunState
from async_grpo.setup.generated.trl_command import called_here, is_called_with, is_yaml, set_environment, write
from async_grpo.setup.grpo_config.values import field_types


class TrainParser(Parser):
    """Leaves the flags that it does not have to TRL, as `trl_arguments`, where a YAML file or a model is named."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse takes "" for the file: without it, the value of a flag of TRL
        found, rest = super().parse_known_args(["", *(sys.argv[1:] if args is None else args)], namespace)
        if found.config == Path() and rest and not rest[0].startswith("-"):
            found.config = Path(rest.pop(0))
        elif found.config == Path():  # nor --config, as TRL's command names the file
            found.config, found.given = self.get_default("config"), found.given - {"config"}
        named = "config" in found.given
        theirs = is_yaml(found.config) if named else any(text.startswith("--model-name") for text in rest)
        found.trl_arguments = rest if theirs and not found.resume else []
        return found, rest[len(found.trl_arguments) :]

    def hint(self, unknown: str) -> str:
        if (name := unknown.lstrip("-").replace("-", "_")) in field_types():
            return f". With a Python file, or --resume, it is --set {name}=VALUE"
        return super().hint(unknown) or ". Flags of `trl grpo` go with its YAML file, or with --model_name_or_path"


def use_arguments(args: argparse.Namespace, begun: RunState | None) -> None:
    """Where the command line is TRL's, make `args.config` the setup file for it, and `args.trl` the record of it.

    Args:
        begun: the run to be resumed, perhaps with the same file.

    Raises:
        UsageError: a file or a flag that cannot be used.
    """
    flags: list[str] = getattr(args, "trl_arguments", [])  # `train` alone takes them
    file: Path | None = args.config if "config" in args.given else None
    call = None if begun is None else begun.plan.trl
    if call is not None and (file is None or is_called_with(call, file)):
        set_environment(call.arguments)
        args.given -= {"config"}  # the run keeps its arguments
    elif flags or (file is not None and is_yaml(file)):
        args.trl = called_here(file, flags)
        args.config = write(args.trl)
