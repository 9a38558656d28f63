"""Options that several commands share. A flag beats the environment, which beats the default."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from async_grpo.cli.parser import Parser
from async_grpo.formatting import printable
from async_grpo.rundir import run_options
from async_grpo.rundir.paths import FINISHED, STOPPED, RunDir, RunState
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import LaunchSettings, TrainingSettings, WorkerSettings, flag_name, log_level, memory_size
from async_grpo.setup.devices import CPU, hold_to_device, threads_per_process
from async_grpo.setup.generated.trl_command import setup_file_of_run

DEFAULT_CONFIG = Path("src/app/trainer_setup_gsmk.py")
DEFAULT_RUN_DIR = Path("worker")
SHORT_FLAGS = {"steps": ("-s",), "num_workers": ("-n",), "quiet": ("-q",)}
PROCESSES = ("num_workers", "master_device_id", "worker_device_ids")
LEFT_OUT_SHOWN = 3
_OF_EVERY_TRAINING = ("steps", "seed", "set", "run_name", "run_group", "run_tags")  # in one process, too
T = TypeVar("T")


def parser(command: str, description: str, examples: str, kind: type[Parser] = Parser) -> Parser:
    return kind(
        prog=f"async-grpo {command}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run_to_resume(args: argparse.Namespace) -> RunState | None:
    """The run that `--resume` means, as it was begun. Without a run there is nothing to recall: `prepare` refuses."""
    return RunDir(args.run_dir).read_state(accepted=True) if args.resume else None


def resumed(args: argparse.Namespace, state: RunState) -> argparse.Namespace | None:
    """The arguments of `--resume`: what the command line leaves out is as the run was begun. Says what it changes.

    None, which is said as well: the run has done all steps that they ask for.
    """
    recalled = run_options.recall(state, given(args))
    begun = {} if "config" in args.given else {"config": setup_file_of_run(state), "trl": state.plan.trl}
    found = argparse.Namespace(**{**vars(args), **recalled.options, **begun})
    to_finish = state.state == STOPPED  # at its last step: that is still to be done
    if found.steps is not None and state.state in (FINISHED, STOPPED) and state.step >= found.steps + to_finish:
        print(
            f"nothing to do: run {state.run_id} in {args.run_dir} is at step {state.step} of {found.steps}. To train "
            "on: --resume --steps N"
        )
        return None
    for change in [*run_options.config_change(state, found.config), *recalled.changes]:
        print(printable(f"resuming run {state.run_id}: {change}"))
    return found


def given(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line gave, by name."""
    return {name: _anywhere(getattr(args, name)) for name in args.given}


def _anywhere(value: Any) -> Any:
    """A path as an absolute one: a resume may be started in another folder."""
    return value.absolute() if isinstance(value, Path) else value


def planned(args: argparse.Namespace, **came_to: Any) -> RunPlan:
    """The plan of the run that a command line asks for, with what its options came to."""
    launch = gathered(LaunchSettings, args)
    return RunPlan(
        config=args.config.absolute(),
        training=gathered(TrainingSettings, args),
        work=gathered(WorkerSettings, args),
        launch=replace(launch, accelerate_config=_anywhere(launch.accelerate_config)),
        trl=getattr(args, "trl", None),
        **came_to,
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", type=Path, default=DEFAULT_RUN_DIR, help="queue, logs and metrics of the run (default: worker/)"
    )
    add_settings(parser, LaunchSettings, "log_level")
    add_settings(parser, TrainingSettings, "stall_warning")


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """For a command that looks at one run: `status worker`, or `status --run-dir worker` as for `train`."""

    def folder(text: str) -> Path | str:
        return text if text == argparse.SUPPRESS else Path(text)  # argparse converts the default of a positional

    exclusive = parser.add_mutually_exclusive_group()
    exclusive.add_argument("run_dir", type=folder, nargs="?", default=argparse.SUPPRESS, help="default: worker/")
    exclusive.add_argument("--run-dir", type=Path, default=DEFAULT_RUN_DIR, help="the same")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """For a command that computes on one device; `choose_device` understands it."""
    parser.add_argument("--device", "-d", help="GPU index or 'cpu' (default: GPU 0 where there is one)")


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help=f"setup file (default: {DEFAULT_CONFIG})")


def add_gpu_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-memory",
        type=memory_size,
        metavar="40GB",
        help="also say what fits GPUs of this memory, by the rules of docs/what_fits.md",
    )


def add_settings(parser: argparse._ActionsContainer, settings: type, *names: str) -> None:
    """Add the flags of these fields of a class of settings, as their metadata describes them."""
    declared = {field.name: field for field in fields(settings)}
    for name in names:
        field = declared[name]
        flags = [flag_name(name), *SHORT_FLAGS.get(name, ())]
        if field.default is False:
            parser.add_argument(*flags, action="store_true", **field.metadata)
        else:
            parser.add_argument(*flags, default=field.default, **field.metadata)


def add_training_options(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, TrainingSettings, *_OF_EVERY_TRAINING)


def add_distributed_options(parser: argparse.ArgumentParser) -> None:
    """What the parameter server takes besides `add_training_options`."""
    elsewhere = (*_OF_EVERY_TRAINING, "stall_warning", "resume")
    add_settings(parser, TrainingSettings, *(f.name for f in fields(TrainingSettings) if f.name not in elsewhere))
    unfinished = parser.add_mutually_exclusive_group()
    add_settings(unfinished, TrainingSettings, "resume")
    add_settings(unfinished, LaunchSettings, "overwrite")


def add_worker_options(parser: argparse._ActionsContainer) -> None:
    """What a worker takes, and `train` passes on to its workers."""
    add_settings(parser, WorkerSettings, *(f.name for f in fields(WorkerSettings) if f.name != "stall_warning"))


def gathered(kind: type[T], args: argparse.Namespace) -> T:
    """A dataclass whose fields are options of the command, or have their defaults."""
    return kind(**{field.name: getattr(args, field.name, field.default) for field in fields(kind)})  # type: ignore[arg-type]


def print_left_out(skipped: Mapping[str, str]) -> None:
    """Say which files of a run could not be used: the first few, and how many more."""
    for sentence in list(skipped.values())[:LEFT_OUT_SHOWN]:
        print(printable(f"left out: {sentence}"))
    if len(skipped) > LEFT_OUT_SHOWN:
        print(f"left out: {len(skipped) - LEFT_OUT_SHOWN} more")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with a name in the first column and figures in the others."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=printable(title), title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(printable, row))
    Console(soft_wrap=True, markup=False).print(table)


def add_launched_option(parser: argparse.ArgumentParser) -> None:
    """Set by `train --distributed` on its children: its pid. It has prepared the run, and keeps their logs."""
    parser.add_argument("--launched-by", type=int, metavar="PID", help=argparse.SUPPRESS)


def become_role(args: argparse.Namespace, device: str, *, fast_inference: str, one_device: bool = True) -> None:
    """Set this process up as a server or a worker, before anything imports torch.

    Args:
        one_device: False for a rank of a distributed launch, which finds its own among those that all ranks see.
    """
    from async_grpo.setup.process import (
        end_with_parent,
        ignore_stacks_signal,
        keep_freed_memory,
        log_prints,
        rank_of_launch,
        set_up_log,
    )

    ignore_stacks_signal()
    rank, ranks = rank_of_launch(os.environ)
    set_up_log(log_level(args.log_level), rank=rank)
    if args.launched_by is not None:  # ranks end in good order with rank 0: with their parent, only all at once
        end_with_parent(args.launched_by, signal.SIGTERM if ranks == 1 else signal.SIGKILL)
        log_prints()
    if one_device or device == CPU:
        hold_to_device(device, os.environ)
    if device == CPU:  # started by hand: how many processes share the cores is unknown, but at least two
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(2)))
        keep_freed_memory(os.environ)
    os.environ["FAST_INFERENCE"] = fast_inference
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Other processes share this GPU. JAX, which a reward function may import, would take three quarters of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # torch 2.11 to 2.13 take cuDNN's attention first on an H100. It makes a plan for each shape, and here nearly every
    # pass has another; and where a mask is given its gradients can be NaN (pytorch issue 196678).
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
