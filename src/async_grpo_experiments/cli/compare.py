"""`async-grpo compare A B`: the difference of two sweeps, with its intervals."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from async_grpo.cli import options
from async_grpo.cli.parser import Parser
from async_grpo.formatting import printable
from async_grpo.rundir.files import write_json
from async_grpo.settings import not_negative

EXAMPLES = """\
  async-grpo compare outputs/sweep_gsm8k plain/sweep_gsm8k           at the last evaluation that all runs have
  async-grpo compare A B --figure pass@5 --step 80 --json effect.json"""


def build_parser() -> Parser:
    parser = options.parser("compare", "Say how much better one sweep is than another, and how sure that is.", EXAMPLES)
    parser.add_argument("a", type=Path, metavar="A", help="a sweep's folder, or its --output-base")
    parser.add_argument("b", type=Path, metavar="B", help="another one")
    parser.add_argument(
        "--figure",
        metavar="NAME",
        help="of evaluations.jsonl (default: success_rate where it is known what success is, else reward_mean)",
    )
    parser.add_argument("--step", type=not_negative, help="default: the last step that all runs evaluated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo_experiments.sweeps.comparison import compare, in_words, side

    a, b = side(args.a), side(args.b)
    effect = compare(a, b, figure=args.figure, step=args.step)
    print(printable("\n".join(in_words(effect, a, b))))
    if args.json is not None:
        write_json(args.json, {"a": a.name, "b": b.name, **asdict(effect)})
    return 0
