"""`async-grpo COMMAND`: one file a command, heavy imports inside functions only, so that `--help` is instant.

`compute/` has the commands that train or generate, and the one that writes their setup file; `inspect/` has those that
read what is there. Those of many runs are in the package `async_grpo_experiments`, which is imported by name when one
of them is called. What all have in common is in `options`.
"""

from __future__ import annotations

import errno
import io
import os
import sys

from async_grpo.errors import AsyncGRPOError
from async_grpo.version import __version__

TYPE_CHECKING = False  # without importing `typing`: a Ctrl-C before `main` is a traceback, so little is imported here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

COMPUTE = {
    "init": "write a setup file that trains as it is, with the parts to change marked",
    "train": "train a setup file: in one process, or distributed over a parameter server and workers",
    "check": "two steps of a setup file as a run and in plain TRL on the same completions: what is equal, what is not",
    "server": "start the parameter server alone",
    "worker": "start one rollout worker",
    "evaluate": "have workers answer a setup file's eval_dataset with the weights of a checkpoint: pass@k and others",
    "generate": "have workers sample a setup file's training data with given weights: rows with rewards, for SFT",
    "chat": "ask a checkpoint something, and read its answer",
    "replay": "train again from the archived groups of a run, with other settings or the same",
}
INSPECT = {
    "status": "what a run does, which process waits for which, what holds it up",
    "board": "a run's curves, samples and settings in TensorBoard",
    "rollouts": "read what the model wrote, in the terminal or as a page",
    "audit": "prove from a run's files that no prompt group was lost or used twice",
    "doctor": "check machine, directory and setup file, and say how to fix what is wrong; --dump for bug reports",
    "delta": "verify, rebuild and study the versions that a run kept with --delta-every",
    "queue": "look at a run's queue and repair it by hand",
}
EXPERIMENTS = {
    "experiment": "run a matrix of algorithms, models, datasets and rounds, resumed and summed up",
    "sweep": "train a setup file on several seeds side by side, and sum up what they agree on",
    "compare": "how much better one sweep is than another, over seeds and over problems",
}
HIDDEN = {"nodes": "claim for the workers of other machines; `train --ray` starts it"}
_HOMES = {
    "async_grpo.cli.compute": {**COMPUTE, **HIDDEN},
    "async_grpo.cli.inspect": INSPECT,
    "async_grpo_experiments.cli": EXPERIMENTS,
}
COMMANDS = {**COMPUTE, **INSPECT, **EXPERIMENTS}
_TRAINING = ("train", "server", "worker", "replay")  # what ends with its output is not done
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CUT_OFF = 141  # what a shell shows for a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 for a failed run, 2 for input that cannot be used."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(given)
    except BrokenPipeError:
        if not _reader_has_gone():  # it is of another pipe, such as one of the user's code
            raise
        _write_no_more()
        return _CUT_OFF if _trains(given) else 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich makes this of it
            return 0
        raise
    except AsyncGRPOError as error:
        _complain(str(error))
        return error.exit_code
    except OSError as error:
        from async_grpo.rundir.system_errors import sentence_of

        if (sentence := sentence_of(error)) is None or _is_of_users_code(error):
            raise
        if error.errno not in _FULL:
            _complain(sentence)
            return 2
        _write_no_more()  # it may be this command's output that has no space
        _complain(sentence)
        return 1
    except KeyboardInterrupt:
        return 130


def _complain(text: str) -> None:
    from async_grpo.formatting import printable
    from async_grpo.rundir.system_errors import GONE, is_started_nowhere

    if text != GONE and is_started_nowhere():
        text = f"{text}\n{GONE}"
    print(printable(f"error: {text}"), file=sys.stderr)  # it may quote what a model wrote


def _is_of_users_code(error: BaseException) -> bool:
    """Whether code of the user's is among the callers, to which a traceback leads."""
    import traceback

    from async_grpo.rollout.failures import is_users_code

    return any(is_users_code(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


def _trains(given: Sequence[str]) -> bool:
    return bool(given) and given[0] in _TRAINING and not {"--help", "-h"} & {*given}


def _reader_has_gone() -> bool:
    """Whether the pipe of this command's output is closed: `async-grpo status | head`, which has what it wanted."""
    import select

    outputs = select.poll()
    for number in (1, 2):
        outputs.register(number, 0)  # POLLERR and POLLHUP are always told
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in outputs.poll(0))


def _write_no_more() -> None:
    """What is left of the output goes nowhere, so that the end of the process does not fail by it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name need not be text
    if not argv or argv[0] not in {*COMMANDS, *HIDDEN}:
        return _top_level(argv)
    command = command_module(argv[0])
    code = int(command.run(_parsed(command.build_parser(), argv[1:])))
    sys.stdout.flush()
    return code


def command_module(name: str) -> Any:
    """The module of a command, with its `build_parser()` and `run(args)`."""
    import importlib

    home = next(home for home, commands in _HOMES.items() if name in commands)
    return importlib.import_module(f"{home}.{name}")


def _top_level(argv: list[str]) -> int:
    import argparse

    from async_grpo.cli.parser import Parser, nearest

    parser = Parser(
        prog="async-grpo",
        description="Bring your TRL GRPOTrainer, run it asynchronously on every GPU you have.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:<9} {text}" for name, text in COMMANDS.items())
        + "\n\nasync-grpo COMMAND --help has the options and examples of each.",
    )
    parser.add_argument("--version", action="version", version=f"async-grpo {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND")
    if argv and not argv[0].startswith("-"):
        parser.error(f"there is no command {argv[0]!r}{nearest(argv[0], COMMANDS)}")
    if argv[:1] == ["--version"]:  # argparse keeps it to itself where the text cannot be written
        print(f"async-grpo {__version__}", flush=True)
        return 0
    _parsed(parser, argv or ["--help"])
    return 2


def _parsed(parser: Any, argv: list[str]) -> Any:
    """Parse a command line. What `--help` prints is written when this ends: a full disk is an error."""
    try:
        return parser.parse_args(argv)
    except SystemExit:
        sys.stdout.flush()
        raise
