"""`async-grpo evaluate MODEL`: what a checkpoint can do, by the evaluation that runs have, without training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.cli import options
from async_grpo.cli.compute import answer_options
from async_grpo.cli.parser import Parser
from async_grpo.errors import UsageError
from async_grpo.formatting import counted, printable
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import shaped
from async_grpo.settings import LaunchSettings, TrainingSettings, etas, positive

if TYPE_CHECKING:
    from async_grpo.evals.estimators import Estimate
    from async_grpo.evals.eval_ledger import Evaluated

EXAMPLES = """\
  async-grpo evaluate outputs/run/checkpoint-100 --config my_trainer.py
  async-grpo evaluate Qwen/Qwen2.5-1.5B-Instruct --config my_trainer.py --eval-temperature 0 --eval-replicates 1
  async-grpo evaluate checkpoint-100 --against checkpoint-50 --config my_trainer.py   the paired difference
  async-grpo evaluate worker@137 --config my_trainer.py     version 137 of the run in worker/ (train --delta-every)
  async-grpo evaluate MODEL --config guided.py --eval-eta 0.1,0.2,off     a guided setup file, by strength
  async-grpo evaluate checkpoint-100 --config my_trainer.py --resume                  after a kill"""

DEFAULT_RUN_DIR = Path("evaluation")
EVAL_SETTINGS = ("eval_replicates", "eval_k", "eval_temperature", "eval_top_p", "eval_top_k")
K_IN_WORDS = (
    "pass@k: the chance that one of k completions succeeds; pass_ordered@k: one of the first k did; mean@k, best@k: of "
    "the rewards of the first k"
)
SUCCESS_IN_WORDS = (  # where `Evaluated.knows_success` is false
    "success: a total reward of at least {:g}, as no reward function has a success_threshold and not all rewards are 0 "
    "or 1"
)
_SAMPLED_WITH = ("seed", "deterministic", *EVAL_SETTINGS)


def build_parser() -> Parser:
    parser = options.parser(
        "evaluate", "Answer the setup file's eval_dataset with the weights of a checkpoint, on workers.", EXAMPLES
    )
    answer_options.add_model(parser)
    parser.add_argument("--against", metavar="OTHER", help="evaluate this one too, and tell the paired difference")
    options.add_config(parser)
    parser.add_argument("--run-dir", type=Path, default=DEFAULT_RUN_DIR, help="default: evaluation/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, too")
    options.add_settings(parser, LaunchSettings, *options.PROCESSES)
    parser.add_argument("--workers", dest="num_workers", type=positive, metavar="N", help="the same as --num-workers")
    options.add_settings(parser, TrainingSettings, *_SAMPLED_WITH, "set", "max_attempts", "stall_warning")
    parser.add_argument(
        "--eval-eta",
        type=etas,
        metavar="ETA,ETA",
        help="strengths of guidance, one evaluation each, e.g. 0.1,0.2,off: in units of the reward; off: the reference "
        "(default: the setup file's)",
    )
    answer_options.add_ending_options(parser, "evaluation")
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo.launch.launcher import launch

    args, begun = answer_options.checked(args, _SAMPLED_WITH)
    options.gathered(TrainingSettings, args).evaluated_ks()
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):  # now, not after it
        raise UsageError(f"--json {args.json} cannot be written: give a file in a folder that exists.")
    if begun is not None:
        answer_options.refuse_other_values(args, begun)
    models = (args.model, *([args.against] if args.against else []))
    plan = answer_options.planned(args, models, etas=args.eval_eta or (() if begun is None else begun.plan.etas))
    return launch(args.run_dir.absolute(), plan) or _tell(args, models, ways=len(plan.etas) or 1)


def _tell(args: argparse.Namespace, models: Sequence[str], ways: int) -> int:
    """Print the figures of each model, sampled in each of the `ways`."""
    from async_grpo.evals.eval_ledger import read, sampling_in_words

    run = RunDir(args.run_dir)
    found = read(run.evaluations)
    if len(found) < ways * len(models):
        print(f"the evaluation was stopped. Continue it: add --resume to the command (--run-dir {args.run_dir})")
        return 0
    differences = read_object(run.comparison)["differences"] if args.against else []
    replicates = found[0].replicates
    named = {f"{models[one.step]}{_strength(one.sampling)}": one for one in found}
    for model, one in named.items():
        figures = _each_once(one.figures, replicates, one.headline)
        _table(model, figures, one.failed, sampling_in_words(one.sampling))
        for task, of_task in one.tasks.items() if len(one.tasks) > 1 else ():  # of one task they are the same
            _table(f"{model}, task {task}", _each_once(of_task, replicates, one.headline), {})
    for difference in differences:
        from async_grpo.evals.estimators import Estimate

        paired = shaped(dict[str, Estimate], difference["figures"], "figures")
        if paired:
            title = f"{args.model} less {args.against}{_strength(difference['sampling'])}, paired"
            _table(title, _each_once(paired, replicates, found[0].headline), {})
    if found[0].figures:
        print(_legend(found[0]))
    if args.json is not None:
        record: dict[str, Any] = {model: asdict(one) for model, one in named.items()}
        by_strength = {_strength(one["sampling"]).lstrip(", "): one["figures"] for one in differences}
        difference = by_strength if ways > 1 else next(iter(by_strength.values()), {})
        args.json.write_text(json.dumps({"models": record, "difference": difference}, indent=2) + "\n")
    return 0


def _strength(sampling: Mapping[str, Any]) -> str:
    """What tells evaluations of one model apart."""
    return f", eta {sampling['eta']}" if "eta" in sampling else ""


def _legend(one: Evaluated) -> str:
    from async_grpo.evals.eval_ledger import SUCCESS

    votes = (
        "; maj@k: the commonest final answer is right" if any(name.startswith("maj@") for name in one.figures) else ""
    )
    return f"{K_IN_WORDS}{votes}" + ("" if one.knows_success else f"\n{SUCCESS_IN_WORDS.format(SUCCESS)}")


def _table(title: str, figures: dict[str, Estimate], failed: dict[str, str], sampled_with: str = "") -> None:
    if not figures:
        reason = next(iter(failed.values()), "unknown")
        print(printable(f"{title}: no problem could be answered. The first reason: {reason}"))
        return
    problems = next(iter(figures.values())).problems
    lacking = f", {len(failed)} more could not be answered" if failed else ""
    rows = [[name, f"{figure.value:.3f}", figure.interval] for name, figure in figures.items()]
    how = f", sampled with {sampled_with}" if sampled_with else ""
    options.print_table(
        f"{title}: {counted(problems, 'problem')}{lacking}{how}", ["figure", "value", "95% interval"], rows
    )


def _each_once(figures: dict[str, Estimate], replicates: int, first: str) -> dict[str, Estimate]:
    """The figures, `first` before all others.

    With one completion a problem, those of k = 1 that are the success rate or the mean reward are left out.
    """
    figures = {name: figures[name] for name in (first, *figures) if name in figures}
    means = [figures[name] for name in ("success_rate", "reward_mean") if name in figures and replicates == 1]
    return {name: one for name, one in figures.items() if not (name.endswith("@1") and one in means)}
