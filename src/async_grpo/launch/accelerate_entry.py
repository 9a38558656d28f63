"""Starts the parameter server as several processes: `python -m async_grpo.launch.accelerate_entry PID CONFIG server …`.

`accelerate launch`, held to the life of the launcher with process id PID: accelerate's own command would outlive it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_grpo.setup.devices import physical_gpus
from async_grpo.setup.process import end_with_parent

_GPU_IDS = re.compile(r"""^\s*["']?gpu_ids["']?\s*:\s*["']?(\d[\d, ]*)""", re.MULTILINE)


_PROCESSES = re.compile(r"""^\s*["']?num_processes["']?\s*:\s*["']?(\d+)""", re.MULTILINE)


_DEEPSPEED = re.compile(r"""^[\s{]*["']?distributed_type["']?\s*:\s*["']?DEEPSPEED\b""", re.MULTILINE | re.IGNORECASE)


def uses_deepspeed(config: Path) -> bool:
    """Whether this configuration of accelerate is one of DeepSpeed, at any stage of ZeRO."""
    return _DEEPSPEED.search(config.read_text(encoding="utf-8")) is not None


def processes_of(config: Path) -> int:
    """How many ranks this configuration of accelerate names."""
    found = _PROCESSES.search(config.read_text(encoding="utf-8"))
    return int(found[1]) if found else 1


def gpus_of(config: Path) -> list[str]:
    """The GPUs that this configuration of accelerate names for the ranks; empty: all that are visible."""
    found = _GPU_IDS.search(config.read_text(encoding="utf-8"))
    return [index.strip() for index in found[1].split(",") if index.strip()] if found else []


def _gpu_options(config: Path, env: Mapping[str, str]) -> list[str]:
    """accelerate sets CUDA_VISIBLE_DEVICES to its `gpu_ids`. Ours count within the devices that are visible already."""
    indices = gpus_of(config)
    return ["--gpu_ids", ",".join(physical_gpus(indices, env))] if indices and "CUDA_VISIBLE_DEVICES" in env else []


def main(arguments: Sequence[str]) -> int:
    parent_pid, config, *command = arguments
    end_with_parent(int(parent_pid))

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ranks = ["--config_file", config, "--main_process_port", "0"]  # 0: any that is free
    ranks += _gpu_options(Path(config), os.environ)
    launched = ["-m", "async_grpo.cli", *command, "--launched-by", str(os.getpid())]
    try:
        launch_command(launch_command_parser().parse_args([*ranks, *launched]))
    except SignalException as stopped:
        return 0 if stopped.sigval in (signal.SIGTERM, signal.SIGINT) else 1
    except ChildFailedError as failed:  # each rank has said why in the log
        _, failure = failed.get_first_failure()
        return abs(failure.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
