"""Runs each command as far as its role, which then asks the driver, as torch would. Run by test_gpu_isolation.py."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from async_grpo.cli import main

ROLES = {
    "server": ("async_grpo.roles.parameter_server.run_parameter_server", ["--overwrite"]),
    "worker": ("async_grpo.roles.rollout_worker.run_worker", []),
    "replay": ("async_grpo.roles.replay.run_replay", []),
    "train": ("async_grpo.setup.setup_file.load_trainer", []),
}


def begin(*_: object, **__: object) -> None:
    """What torch does when it is first asked for a GPU."""
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    sys.stdout.flush()
    os._exit(0)


def run_role(command: str, device: str, setup: str) -> None:
    role, more = ROLES[command]
    folder = f"{setup}.{'plain' if command == 'train' else 'run'}"  # plain TRL refuses the server's
    run_dir = [folder] if command == "replay" else ["--run-dir", folder]
    config = [setup] if command == "train" else ["--config", setup] if command == "server" else []
    with patch(role, begin), patch("async_grpo.setup.devices.check_torch_sees", lambda device: None):
        main([command, *config, *run_dir, "--device", device, *more])


def in_a_child(work: Callable[[], None]) -> int:
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    return pid


if __name__ == "__main__":
    setup = sys.argv[1]
    Path(setup).write_text("def get_trainer(): ...")
    for role, _ in ROLES.values():  # once, not in each child
        importlib.import_module(role.rpartition(".")[0])
    pids = {}
    for command in ROLES:
        for device in ("1", "cpu"):
            pids[in_a_child(lambda c=command, d=device: run_role(c, d, setup))] = [command, device]
    print(json.dumps(pids))
