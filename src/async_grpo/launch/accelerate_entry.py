"""Starts the parameter server as several processes: `python -m async_grpo.launch.accelerate_entry PID CONFIG server …`.

`accelerate launch`, held to the life of the launcher with process id PID: accelerate's own command would outlive it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_grpo.setup.accelerate_config import AccelerateConfig
from async_grpo.setup.devices import physical_gpus
from async_grpo.setup.process import end_with_parent


def _gpu_options(config: Path, env: Mapping[str, str]) -> list[str]:
    """accelerate sets CUDA_VISIBLE_DEVICES to its `gpu_ids`. Ours count within the devices that are visible already."""
    indices = AccelerateConfig.read(config).gpus
    return ["--gpu_ids", ",".join(physical_gpus(indices, env))] if indices and "CUDA_VISIBLE_DEVICES" in env else []


def main(arguments: Sequence[str]) -> int:
    parent_pid, config, *command = arguments
    end_with_parent(int(parent_pid))

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ranks = ["--config_file", config, "--main_process_port", "0"]  # 0: any that is free
    ranks += _gpu_options(Path(config), os.environ)
    launched = ["--no_python", sys.executable, "-Pm", "async_grpo.cli", *command, "--launched-by", str(os.getpid())]
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
