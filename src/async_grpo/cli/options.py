"""Options that several commands share. A flag beats the environment, which beats the default."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from async_grpo.errors import UsageError
from async_grpo.settings import CORRECTIONS, GENERATORS, STALL_WARNING_S, ArchiveLimit, TrainingSettings, WorkerSettings
from async_grpo.setup.devices import CPU, hold_to_device, parse_device, threads_per_process, visible_gpus

DEFAULT_CONFIG = Path("src/app/trainer_setup_gsmk.py")
DEFAULT_RUN_DIR = Path("worker")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"async-grpo {command}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=DEFAULT_RUN_DIR,
        help="queue, logs and metrics of the run (default: worker/)",
    )
    add_log_level_option(parser)
    parser.add_argument(
        "--stall-warning",
        type=positive_seconds,
        default=STALL_WARNING_S,
        metavar="S",
        help="a process that makes no progress for S seconds says what it waits for, since when and for whom "
        "(default: 60)",
    )


def add_log_level_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", type=str.upper, choices=LOG_LEVELS, help="default: $LOG_LEVEL, else INFO")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """For a command that computes on one device; `device()` understands it."""
    parser.add_argument("--device", "-d", help="GPU index or 'cpu' (default: GPU 0 where there is one)")


def add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", "-s", type=positive, help="optimizer steps; overrides max_steps of the setup file")
    parser.add_argument("--seed", type=int, help="overrides the seed of the setup file")


def add_distributed_options(parser: argparse.ArgumentParser) -> None:
    """What the parameter server takes besides `add_training_options`."""
    default = TrainingSettings()
    parser.add_argument(
        "--max-staleness",
        type=not_negative,
        default=default.max_staleness,
        metavar="K",
        help="no rollout is trained on that is more than K policy versions old; 0 is the synchronous schedule "
        "(default: 4)",
    )
    parser.add_argument(
        "--correction",
        choices=CORRECTIONS,
        default=default.correction,
        help="how the loss corrects for stale rollouts (default: bypass, PPO's clip against the sampler)",
    )
    parser.add_argument(
        "--filter-zero-variance",
        action="store_true",
        help="replace groups whose rewards are all equal by new ones until the batch is full (DAPO)",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="the same seed gives the same run on this machine, bit for bit"
    )
    parser.add_argument(
        "--max-attempts",
        type=positive,
        default=default.max_attempts,
        metavar="N",
        help="tries of a failing job before it is set aside (default: 3)",
    )
    parser.add_argument(
        "--keep-done",
        type=ArchiveLimit.parse,
        default=default.keep_done,
        metavar="N",
        help="keep so many used groups, or so many bytes of them (2GB), in done/ (default: 10000)",
    )
    unfinished = parser.add_mutually_exclusive_group()
    unfinished.add_argument("--resume", action="store_true", help="go on with the unfinished run in --run-dir")
    unfinished.add_argument(
        "--overwrite", action="store_true", help="delete the unfinished run in --run-dir (checkpoints stay)"
    )


def add_worker_options(parser: argparse._ActionsContainer) -> None:
    """What a worker takes, and `train` passes on to its workers."""
    default = WorkerSettings()
    parser.add_argument(
        "--groups-per-claim",
        type=groups_per_claim,
        default=default.groups_per_claim,
        metavar="auto|N",
        help="prompt groups that a worker generates in one batch (default: auto, an even share of what is pending)",
    )
    parser.add_argument(
        "--score-concurrency",
        type=positive,
        default=default.score_concurrency,
        metavar="N",
        help="groups that a worker scores while it generates the next ones (default: 4)",
    )
    parser.add_argument(
        "--generator",
        choices=GENERATORS,
        default=default.generator,
        help="what the workers generate with: transformers, or vLLM with continuous batching (default: vllm where the "
        "setup file says use_vllm=True, or it is installed and there is a GPU; else hf)",
    )
    parser.add_argument(
        "--in-flight-update",
        choices=("off", "on"),
        default=default.in_flight_update,
        help="vllm only. off: groups are finished with the weights that began them; on: they go on with new weights "
        "as soon as there are any (default: off)",
    )


def training_settings(args: argparse.Namespace) -> TrainingSettings:
    return TrainingSettings(**{field.name: getattr(args, field.name) for field in fields(TrainingSettings)})


def worker_settings(args: argparse.Namespace) -> WorkerSettings:
    return WorkerSettings(**{field.name: getattr(args, field.name) for field in fields(WorkerSettings)})


def groups_per_claim(text: str) -> int | None:
    return None if text == "auto" else _at_least(text, 1)


def positive(text: str) -> int:
    return _at_least(text, 1)


def not_negative(text: str) -> int:
    return _at_least(text, 0)


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds


def _at_least(text: str, least: int) -> int:
    if not text.lstrip("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


def log_level(args: argparse.Namespace) -> str:
    """The level from the flag, else from `LOG_LEVEL`, else INFO."""
    level = (args.log_level or os.environ.get("LOG_LEVEL") or "INFO").upper()
    if level not in LOG_LEVELS:
        raise UsageError(f"LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, got {level!r}.")
    return level


def device(text: str | None, *, default_gpu: int = 0) -> str:
    """The device that `text` names; without one, GPU `default_gpu` where there is a GPU, else the CPU."""
    gpus = visible_gpus()
    if text is not None:
        return parse_device(text, gpus)
    return str(min(default_gpu, gpus - 1)) if gpus else CPU


def print_left_out(skipped: Mapping[str, str], most: int = 3) -> None:
    """Say which files of a run could not be used: the first few, and how many more."""
    for sentence in list(skipped.values())[:most]:
        print(f"left out: {sentence}")
    if len(skipped) > most:
        print(f"left out: {len(skipped) - most} more")


def add_launched_option(parser: argparse.ArgumentParser) -> None:
    """Set by `train --distributed` on its children: its pid. It has prepared the run, and keeps their logs."""
    parser.add_argument("--launched-by", type=int, metavar="PID", help=argparse.SUPPRESS)


def become_role(args: argparse.Namespace, device: str, *, fast_inference: str, one_device: bool = True) -> None:
    """Set this process up as a server or a worker, before anything imports torch.

    Args:
        one_device: False for a rank of a distributed launch, which finds its own among those that all ranks see.
    """
    from async_grpo.setup.process import end_with_parent, keep_freed_memory, log_prints, rank_of_launch, set_up_log

    rank, ranks = rank_of_launch(os.environ)
    set_up_log(log_level(args), rank=rank)
    if args.launched_by is not None:  # ranks end in good order with rank 0: with their parent, only all at once
        end_with_parent(args.launched_by, signal.SIGTERM if ranks == 1 else signal.SIGKILL)
        log_prints()
    if one_device or device == CPU:
        hold_to_device(device, os.environ)
    if device == CPU:  # started by hand: nobody knows how many processes will share the cores, but there are others
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_process(2)))
        keep_freed_memory(os.environ)
    os.environ["FAST_INFERENCE"] = fast_inference
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
