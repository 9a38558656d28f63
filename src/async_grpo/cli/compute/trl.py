"""`async-grpo train` as `trl grpo` is called: a YAML file, TRL's flags, or both."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from async_grpo.cli.parser import Parser
from async_grpo.errors import UsageError
from async_grpo.rundir.paths import RunState
from async_grpo.setup.generated.trl_arguments import TRLArguments, is_yaml, set_environment
from async_grpo.setup.generated.trl_flags import argument_types, split, what_it_is


class TrainParser(Parser):
    """Also takes the flags of `trl grpo`, as `trl_arguments`. A name that both have is ours."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parts = split(sys.argv[1:] if args is None else args, self._option_string_actions)
        found, unknown = super().parse_known_args(parts.rest, namespace)
        found.trl_arguments = parts.trl
        return found, unknown

    def known(self) -> Iterable[str]:
        return [*super().known(), *(f"--{name}" for name in argument_types())]

    def hint(self, unknown: str) -> str:
        return what_it_is(unknown.removeprefix("--").replace("-", "_")) or super().hint(unknown)


def use_arguments(args: argparse.Namespace, begun: RunState | None) -> None:
    """Where the command line is TRL's, make `args.config` the setup file for it, and `args.trl` the record of it.

    Args:
        begun: the run to be resumed, perhaps with the same file and flags.

    Raises:
        UsageError: TRL would refuse it, or it does not go with what else is asked for.
    """
    flags: list[str] = getattr(args, "trl_arguments", [])  # `train` alone takes them
    file: Path | None = args.config if "config" in args.given else None
    if flags and (args.resume or (file is not None and not is_yaml(file))):
        raise UsageError(_no_use_for(flags[0], args))
    if (file is None and not flags) or (file is not None and not is_yaml(file)):
        return
    trl = None if begun is None else TRLArguments.of_run(begun)
    if trl is None or file is None or not trl.names(file):
        trl = TRLArguments.here(file, flags)
    set_environment(trl.arguments)
    args.trl, args.config = trl, trl.write()


def _no_use_for(flag: str, args: argparse.Namespace) -> str:
    """Why an argument of TRL is refused with a setup file of ours, or with a resume."""
    change = "--set NAME=VALUE gives a field of the GRPOConfig another value"
    if args.resume:
        return f"{flag}: a resumed run keeps the arguments of TRL that it was begun with. {change}."
    return f"{flag} is an argument of `trl grpo`, and {args.config} is a Python file, which does not read it. {change}."
