"""The argument parser of every command: forgiving in spelling, strict in what is given."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from async_grpo.settings import Assign

_UNKNOWN = "unrecognized arguments: "
USAGE_LINES = 4  # of a usage that names the options; a longer one would hide what comes after it


class _Absent(list[Any]):
    """Takes the place of each default while a command line is read. A list, so that an option may append to it."""


class Parser(argparse.ArgumentParser):
    """An argument parser that can tell what a command line gave from what it left to the defaults.

    An abbreviated option is none: what it stands for could change with every new option.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        more.setdefault("allow_abbrev", False)
        super().__init__(*args, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in `argparse`, with `--max_staleness` as another spelling of `--max-staleness`.

        `given` has the names of what the command line gave, without what it left to the defaults.
        """
        absent = _Absent()
        defaults = [(action, action.default) for action in self._actions if action.default is not argparse.SUPPRESS]
        for action, _ in defaults:
            action.default = absent
        try:
            found, rest = super().parse_known_args(list(_dashed(sys.argv[1:] if args is None else args)), namespace)
        finally:
            for action, default in defaults:
                action.default = default
        by_name = {action.dest: default for action, default in reversed(defaults)}  # of two flags the first one's
        found.given = frozenset(name for name in by_name if getattr(found, name) is not absent)
        for name in by_name.keys() - found.given:
            setattr(found, name, by_name[name])
        for action in self._actions:
            values = getattr(found, action.dest, None) if isinstance(action, Assign) else None
            if isinstance(values, dict):
                from async_grpo.setup.grpo_config.values import parsed

                parsed(values)
        return found, rest

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            message += self.hint(message.removeprefix(_UNKNOWN).split()[0].split("=")[0])
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n{self.prog} --help explains the options.\n")

    def print_help(self, file: Any = None) -> None:
        """As in `argparse`, which keeps it to itself where the text cannot be written."""
        (file or sys.stdout).write(self.format_help())

    def format_usage(self) -> str:
        """As in `argparse`, without the options where they would fill a screen."""
        usage = super().format_usage()
        if usage.count("\n") <= USAGE_LINES:
            return usage
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s [OPTIONS] " + " ".join(self._positional_names()), [], [])
        return formatter.format_help()

    def _positional_names(self) -> Iterator[str]:
        """The positional arguments, as a usage shows them."""
        for action in self._get_positional_actions():
            name = str(action.metavar or action.dest)
            yield f"[{name}]" if action.nargs == "?" else name

    def format_help(self) -> str:
        return super().format_help().replace(super().format_usage(), self.format_usage(), 1)

    def hint(self, unknown: str) -> str:
        """What to say of an option that there is not."""
        return nearest(unknown, self._option_string_actions)


def nearest(given: str, known: Iterable[str]) -> str:
    """`". Did you mean --max-staleness?"`, or nothing where no known word is like `given`."""
    import difflib

    words = {name.lstrip("-"): name for name in known}  # all options have the dashes, which make none of them alike
    near = difflib.get_close_matches(given.lstrip("-"), words, n=1)
    return f". Did you mean {words[near[0]]}?" if near else ""


def _dashed(arguments: Sequence[str]) -> Iterator[str]:
    for index, argument in enumerate(arguments):
        if argument == "--":
            yield from arguments[index:]
            return
        name, equals, value = argument.partition("=")
        yield name.replace("_", "-") + equals + value if name.startswith("--") else argument
