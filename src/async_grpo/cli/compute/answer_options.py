"""What `evaluate` and `generate` share, whose workers answer with given weights: options, and the plan of the run."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.cli import options
from async_grpo.cli.parser import Parser
from async_grpo.errors import UsageError
from async_grpo.formatting import printable
from async_grpo.launch.placement import choose_weights, plan_devices
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.rundir.run_options import recall
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import LaunchSettings, TrainingSettings, as_sets
from async_grpo.setup.generated.trl_command import setup_file

_CONFIGS = ("config.json", "adapter_config.json")  # one is in each folder that has weights


def add_model(parser: Parser) -> None:
    parser.add_argument("model", help="a checkpoint's folder, an adapter's, a model of the hub, or RUN_DIR@N")


def add_ending_options(parser: Parser, what: str) -> None:
    """Add the options of workers, of an unfinished run (`what`: such as "generation") and of the log."""
    options.add_worker_options(parser)
    unfinished = parser.add_mutually_exclusive_group()
    options.add_settings(unfinished, TrainingSettings, "resume")
    unfinished.add_argument("--overwrite", action="store_true", help=f"delete the unfinished {what} in --run-dir")
    options.add_settings(parser, LaunchSettings, "log_level")


def checked(args: argparse.Namespace, sampled_with: Sequence[str]) -> tuple[argparse.Namespace, RunState | None]:
    """The arguments, and the run that `--resume` continues, whose `sampled_with` they have where they give no other.

    Raises:
        UsageError: there is no such setup file, or it would touch a training run.
    """
    from async_grpo.setup.setup_file import check_setup_file

    if (begun := options.run_to_resume(args)) is not None:
        found = recall(begun, options.given(args), sampled_with)
        for change in found.changes:
            print(printable(f"resuming the run in {args.run_dir}: {change}"))
        args = argparse.Namespace(**{**vars(args), **found.options})
    args.config = setup_file(args.config)
    check_setup_file(args.config)
    if (args.resume or args.overwrite) and RunDir(args.run_dir).consumption.exists():
        raise UsageError(
            f"{args.run_dir} holds a training run, which would lose what it has. Choose another --run-dir."
        )
    return args, begun


def planned(args: argparse.Namespace, models: Sequence[str], **more: Any) -> RunPlan:
    """The plan of a run whose workers answer with these models, one after the other.

    Raises:
        UsageError: a model cannot be found, or there are no workers: those of this machine are all there are.
    """
    if args.num_workers == 0:
        raise UsageError("--num-workers 0 leaves nobody to answer. Give it a number of at least 1.")
    master, workers = plan_devices(args.master_device_id, args.worker_device_ids, args.num_workers)
    return options.planned(
        args,
        models=tuple(map(_absolute, models)),
        master_device=master,
        worker_devices=workers,
        weights=choose_weights("auto", master, workers, args.server_devices),
        **more,
    )


def refuse_other_values(args: argparse.Namespace, state: RunState) -> None:
    """Answers of an earlier process are used again, so a resume builds the trainer as that one did."""
    if (begun_with := state.plan.training.set or {}) == (args.set or {}):
        return
    flags = printable(shlex.join(as_sets(begun_with)))
    begun = f"with {flags}" if flags else "without --set"
    raise UsageError(
        f"The run in {args.run_dir} was begun {begun}, and its answers are used again. "
        "Give the same values with --resume, or choose another --run-dir."
    )


def _absolute(model: str) -> str:
    """Make a folder's path absolute, as the server may run elsewhere; anything else is a name of the hub."""
    from async_grpo.deltas.chain import Chain, chain_folder, named_version, require_version

    if (named := named_version(model)) is not None:
        require_version(named)
        return f"{named.folder}@{named.version}"
    path = Path(model).expanduser()
    if not path.exists() and (path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1):
        raise UsageError(f"There is no folder {model}, and it is no name of a model of the hub either.")
    if path.exists() and not any((path / name).exists() for name in _CONFIGS):
        if RunDir(path).read_state() is None:
            raise UsageError(f"{model} holds no weights: it has neither {' nor '.join(_CONFIGS)}.")
        newest = max(Chain(chain_folder(path)).versions, default=None)
        such_as = f"Name one of the versions that it kept, such as {model}@{newest}."
        raise UsageError(f"{model} is a run directory. {such_as if newest is not None else 'It kept none yet.'}")
    return str(path.absolute()) if path.exists() else model
