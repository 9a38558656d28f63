"""`async-grpo generate MODEL`: completions of the training data with rewards, as rows, without training."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from async_grpo.cli import options
from async_grpo.cli.compute import answer_options
from async_grpo.cli.parser import Parser
from async_grpo.errors import UsageError
from async_grpo.formatting import printable
from async_grpo.rundir.paths import FINISHED, RunDir, RunState
from async_grpo.rundir.run_plan import SampledRows
from async_grpo.settings import LaunchSettings, TrainingSettings, positive

EXAMPLES = """\
  async-grpo generate outputs/run/checkpoint-100 --config my_trainer.py -n 2 --out samples
  async-grpo generate Qwen/Qwen2.5-1.5B-Instruct --config my_trainer.py --samples 16 --set temperature=0.7 --out samples
  async-grpo generate outputs/run/checkpoint-100 --config my_trainer.py --resume          after a kill
  python -c 'print(__import__("datasets").load_from_disk("samples"))'"""

DEFAULT_RUN_DIR = Path("generation")
_SAMPLED_WITH = ("seed", "deterministic")


def build_parser() -> Parser:
    parser = options.parser(
        "generate",
        "Sample completions of the setup file's training data with the weights of a checkpoint, score them, and write "
        "them as rows.",
        EXAMPLES,
    )
    answer_options.add_model(parser)
    options.add_config(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the rows, for datasets.load_from_disk (default: samples/)"
    )
    parser.add_argument(
        "--samples", type=positive, metavar="N", help="completions of each row (default: the setup file's)"
    )
    parser.add_argument("--run-dir", type=Path, default=DEFAULT_RUN_DIR, help="default: generation/")
    options.add_settings(parser, LaunchSettings, *options.PROCESSES)
    options.add_settings(parser, TrainingSettings, "seed", "set", "deterministic", "max_attempts", "stall_warning")
    answer_options.add_ending_options(parser, "generation")
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo.launch.launcher import launch

    args, begun = answer_options.checked(args, _SAMPLED_WITH)
    rows = SampledRows((args.out or Path("samples")).absolute(), args.samples)
    if begun is not None:
        rows = _as_begun(args, begun)
        answer_options.refuse_other_values(args, begun)
    elif rows.out.exists():
        raise UsageError(f"{rows.out} exists. Choose another --out, or move it away.")
    plan = answer_options.planned(args, (args.model,), rows=rows)
    code = launch(args.run_dir.absolute(), plan)
    if code == 0:
        run = RunDir(args.run_dir)
        said = f"the rows are in {rows.out}: datasets.load_from_disk({str(rows.out)!r})"
        if run.state_of(None).state != FINISHED:
            said = f"the generation was stopped. Continue it: add --resume to the command (--run-dir {run.root})"
        print(printable(said))
    return code


def _as_begun(args: argparse.Namespace, begun: RunState) -> SampledRows:
    """The rows that the run was begun for. `UsageError`: the command line asks for others."""
    rows = begun.plan.rows
    if rows is None:
        raise UsageError(f"{args.run_dir} holds another kind of run. Choose the --run-dir of the generation.")
    out, samples = args.out or rows.out, rows.samples if args.samples is None else args.samples
    if replace(rows, out=out.absolute(), samples=samples) != rows:
        asked = "" if rows.samples is None else f" --samples {rows.samples}"
        raise UsageError(
            f"The generation in {args.run_dir} was begun with --out {rows.out}{asked}. Give the same values with "
            "--resume, or choose another --run-dir."
        )
    return rows
