"""`async-grpo check`: does a run of this setup file train as plain TRL does?"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from async_grpo.cli import options
from async_grpo.errors import reason_of
from async_grpo.setup.devices import CPU, choose_device

EXAMPLES = """\
  async-grpo check my_trainer.py                  on the first GPU, without one on the CPU
  async-grpo check my_trainer.py --tiny           on the CPU, with a small random model of the file's architecture
  async-grpo check my_trainer.py --json FILE      also for programs; exit code 1 where there is a difference"""
SEED = 0


def build_parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "check",
        "Train two steps of a setup file at staleness 0 with one worker, then the same two in plain TRL on the same "
        "completions, and compare all that the file's code was given and all that came out. Its rewards are called, "
        "and may cost what they cost. Exit code 0: no difference; 1: a difference; 2: it cannot be compared.",
        EXAMPLES,
    )
    parser.add_argument("config", type=Path, help="Python file with get_trainer()")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="on the CPU, with a model of the same architecture and tokenizer, small dimensions and random weights",
    )
    parser.add_argument("--seed", type=int, default=SEED, help=f"of both trainings (default: {SEED})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all lines to FILE as well")
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo.checks.differential.check import check
    from async_grpo.checks.differential.checked_trainer import CheckOptions
    from async_grpo.checks.differential.lines import Status, printed, verdict
    from async_grpo.rundir.files import write_json

    lines, differs, error = [], False, ""
    try:
        device = CPU if args.tiny else choose_device(None)
        asked = CheckOptions(config=str(args.config.absolute()), device=device, seed=args.seed, tiny=args.tiny)
        for line in check(asked, say=lambda text: print(text, file=sys.stderr, flush=True)):
            lines.append(line)
            differs |= line.status is Status.DIFFERS
            print(printed(line, colour=sys.stdout.isatty()), flush=True)
    except BaseException as failure:
        error = reason_of(failure)
        raise
    finally:
        if args.json is not None:
            write_json(args.json, {"ok": not (differs or error), "error": error, "lines": [*map(asdict, lines)]})
    print(f"\n{verdict(lines)}")
    return int(differs)
