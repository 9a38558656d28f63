"""What `server` and `worker` have in common: becoming a process of a run, started by hand or by a launcher."""

from __future__ import annotations

import argparse
import os
import signal

from async_grpo.cli import common
from async_grpo.devices import CPU, hold_to_device, threads_per_process


def add_launched_option(parser: argparse.ArgumentParser) -> None:
    """Set by `train --distributed` on its children: its pid. It has prepared the run, and keeps their logs."""
    parser.add_argument("--launched-by", type=int, metavar="PID", help=argparse.SUPPRESS)


def become_role(args: argparse.Namespace, device: str, *, fast_inference: str, one_device: bool = True) -> None:
    """Set this process up as a server or a worker, before anything imports torch.

    Args:
        one_device: False for a rank of a distributed launch, which finds its own among those that all ranks see.
    """
    from async_grpo.process import end_with_parent, keep_freed_memory, log_prints, rank_of_launch, set_up_log

    rank, ranks = rank_of_launch(os.environ)
    set_up_log(common.log_level(args), rank=rank)
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
