"""`async-grpo init`: write a setup file to begin with."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from async_grpo.cli import options
from async_grpo.errors import UsageError

DEFAULT_FILE = Path("my_trainer.py")
TEMPLATE = Path(__file__).with_name("init_template.py")

EXAMPLES = """\
  async-grpo init                     writes my_trainer.py
  async-grpo init sums/trainer.py     writes this file; its folder must exist
  async-grpo init && async-grpo train my_trainer.py --distributed"""


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "init",
        "Write a setup file that trains as it is, without a GPU or a download, with the parts to change marked. "
        "Asks nothing, and overwrites nothing.",
        EXAMPLES,
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=DEFAULT_FILE, metavar="FILE", help=f"default: {DEFAULT_FILE}"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    path: Path = args.file
    if path.suffix != ".py":
        raise UsageError(f"A setup file is a Python file, and {path} does not end in .py. Try {path.name}.py.")
    name = shlex.quote(str(path))
    _create(path, TEMPLATE.read_text().replace("async-grpo train my_trainer.py", f"async-grpo train {name}"))
    print(
        f"{path} is written. It trains as it is, without a GPU:\n\n"
        f"  async-grpo train {name} --distributed\n\n"
        "Then change the parts marked CHANGE: the dataset, the reward, the model."
    )
    return 0


def _create(path: Path, text: str) -> None:
    """Write a file that was not there before."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} is there already, and stays as it is. Name another file.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Name a file in a folder of yours.") from error
