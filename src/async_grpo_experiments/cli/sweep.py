"""`async-grpo sweep`: one setup file on many seeds, side by side, and what the seeds agree on."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

from async_grpo.cli import options
from async_grpo.cli.compute.modes import refuse_without_effect
from async_grpo.cli.parser import Parser
from async_grpo.errors import UsageError
from async_grpo.settings import (
    TrainingSettings,
    WorkerSettings,
    flag_name,
    not_negative,
    not_negative_number,
    positive,
    seed_number,
)
from async_grpo.setup.generated.trl_command import setup_file
from async_grpo_experiments.sweeps import plan
from async_grpo_experiments.sweeps.plan import DEFAULT_SEEDS, OWN_SETTINGS, Sweep, name_of

EXAMPLES = """\
  async-grpo sweep my_trainer.py --seeds 42,1337,2024,9999           as many runs at once as there is room for
  async-grpo sweep my_trainer.py --gpus-per-run 2 --num-instances 4  four runs at once, two GPUs each
  async-grpo sweep --dataset gsm8k --set learning_rate=1e-6          the recipe for GSM8K, MATH or MBPP
  async-grpo sweep my_trainer.py --mode trl                          plain TRL for each seed, to compare with
  async-grpo sweep outputs/sweep_gsm8k --resume                      continue after a kill; finished runs stay

exit codes: 0 all runs finished; 1 at least one failed; 2 nothing could be started; 130 stopped by Ctrl-C"""
DATASETS = ("gsm8k", "math", "mbpp")
DATASET_SETUP = Path("src/app/trainer_setup_dataset.py")
_IDENTITY = ("output_base", "run_prefix", "start_instance", "config", "dataset")  # say which sweep is meant
_TRAINING = tuple(f.name for f in fields(TrainingSettings) if f.name not in ("resume", *OWN_SETTINGS))
_WORK = tuple(f.name for f in fields(WorkerSettings) if f.name != "stall_warning")


def build_parser() -> Parser:
    parser = options.parser(
        "sweep", "Run a setup file on several seeds at once, and sum up what they agree on.", EXAMPLES
    )
    parser.add_argument("config", nargs="?", type=Path, help="setup file; with --resume also the folder of a sweep")
    parser.add_argument("--seeds", type=seeds, metavar="S,S", help="default: 42,1337,2024,9999")
    parser.add_argument("--mode", choices=("async", "trl"), default="async", help="trl: plain TRL (default: async)")
    parser.add_argument("--dataset", choices=DATASETS, help=f"set DATASET; without a setup file: {DATASET_SETUP}")
    parser.add_argument("--num-instances", type=positive, metavar="N", help="runs at once (default: all that fit)")
    parser.add_argument("--gpus-per-run", type=positive, metavar="N", help="default: 1; without GPUs, runs share cores")
    parser.add_argument("--num-workers", "-n", type=positive, help="workers of each run (default: as `train`)")
    parser.add_argument(
        "--stagger",
        type=not_negative_number,
        default=plan.STAGGER_S,
        metavar="S",
        help=f"seconds between the starts of two runs (default: {plan.STAGGER_S:g})",
    )
    where = parser.add_argument_group("two sweeps on one machine", "each of these moves everything that could clash")
    where.add_argument("--start-instance", type=not_negative, default=0, metavar="I", help="number of the first run")
    where.add_argument("--base-port", type=port, default=8000, metavar="P", help="port of instance 0 (default: 8000)")
    where.add_argument("--output-base", type=Path, default=Path("outputs"), help="default: outputs/")
    where.add_argument("--run-prefix", type=prefix, metavar="NAME", help="begins the name of each run")
    parser.add_argument("--resume", action="store_true", help="continue a sweep; finished runs are not run again")
    options.add_settings(parser, TrainingSettings, "set", *_TRAINING)
    options.add_settings(parser.add_argument_group("workers of each run"), WorkerSettings, *_WORK)
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo_experiments.sweeps.sweep import run_sweep

    return run_sweep(_resumed(args) if args.resume else _sweep(args), resume=args.resume)


def _sweep(args: argparse.Namespace) -> Sweep:
    from async_grpo.setup.setup_file import check_setup_file

    setup = args.config or (DATASET_SETUP if args.dataset else None)
    if setup is None:
        raise UsageError("Say what to train: a setup file, or --dataset gsm8k, math or mbpp.")
    name = name_of(setup, args.dataset)
    setup = setup_file(setup)
    check_setup_file(setup)
    if args.mode == "trl":
        _refuse_for_plain_trl(args.given)
    else:
        refuse_without_effect(args)
    if own := [name for name in ("output_dir", "run_name") if name in (args.set or {})]:
        raise UsageError(f"--set {own[0]}: each run of a sweep has its own. Choose --output-base and --run-prefix.")
    return Sweep(
        setup=str(setup.absolute()),
        seeds=args.seeds or DEFAULT_SEEDS[: args.num_instances],
        mode=args.mode,
        name=name,
        dataset=args.dataset,
        output_base=str(args.output_base),
        run_prefix=args.run_prefix or "",
        start_instance=args.start_instance,
        base_port=args.base_port,
        gpus_per_run=args.gpus_per_run,
        num_instances=args.num_instances,
        stagger_s=args.stagger,
        num_workers=args.num_workers,
        training=options.gathered(TrainingSettings, args),
        work=options.gathered(WorkerSettings, args),
        given=tuple(name for name in (*_TRAINING, *_WORK) if name in args.given),
    )


def _refuse_for_plain_trl(given: Collection[str]) -> None:
    known = ("steps", "eval_every", "delta_every", "delta_keep", "server_timeout")
    names = (*_TRAINING, *_WORK, "num_workers")
    unused = [flag_name(name) for name in names if name in given and name not in known]
    if unused:
        raise UsageError(f"{', '.join(unused)}: plain TRL (--mode trl) has no such option. Leave it out.")


def _resumed(args: argparse.Namespace) -> Sweep:
    """The sweep to continue, with the options that it was begun with."""
    if other := sorted(args.given - {*_IDENTITY, "resume"}):
        raise UsageError(
            f"A resumed sweep has the options that it was begun with: leave {', '.join(map(flag_name, other))} out."
        )
    if args.config is not None and args.config.is_dir():
        return plan.own(plan.find(args.config))
    if args.config is None and args.dataset is None:
        return plan.own(plan.find(args.output_base))
    if args.config is not None and not args.config.exists():  # the old name of a sweep's folder, perhaps
        raise UsageError(
            f"{args.config} does not exist: neither a sweep's folder nor a setup file has this name now. Name the "
            "folder of the sweep to continue, as it is called now."
        )
    begun = argparse.Namespace(**{**vars(args), "resume": False, "given": frozenset()})
    return plan.own(_sweep(begun).folder)


def seeds(text: str) -> tuple[int, ...]:
    """`42,1337`."""
    return tuple(seed_number(part.strip()) for part in text.split(","))


def port(text: str) -> int:
    number = positive(text)
    if not 1024 <= number <= 22000:
        raise argparse.ArgumentTypeError(f"must be from 1024 to 22000, since group ports are 43200 above, got {text}")
    return number


def prefix(text: str) -> str:
    if not text.replace("-", "").replace("_", "").replace(".", "").isalnum() or text.startswith("."):
        raise argparse.ArgumentTypeError(f"must be letters, digits, '-', '_' and '.', got {text!r}")
    return text
