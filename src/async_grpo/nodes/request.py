"""Refuses, before anything starts, what a command line cannot ask of other machines. Ray is not imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from async_grpo.errors import UsageError
from async_grpo.nodes.tree import packed
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import LaunchSettings
from async_grpo.setup.accelerate_config import AccelerateConfig
from async_grpo.setup.generated.sent_function import VARIABLE

RAY = "2.60"  # the version that is pinned in pyproject.toml
WORDS = ("auto", "local")


def check_request(plan: RunPlan, env: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` where the plan of a run with `--ray` cannot be."""
    launch = plan.launch
    require_ray()
    address = launch.ray or ""
    if address not in WORDS and not address.rpartition(":")[2].isdecimal():
        raise UsageError(f"--ray must be auto, local or HOST:PORT, got {address!r}.")
    if address == "local" and (launch.nodes or 1) < 2:
        raise UsageError("--ray local makes a cluster of this machine: say of how many nodes, --nodes 2 or more.")
    if launch.nodes == 1 and not plan.num_workers:
        raise UsageError("-n 0 with --nodes 1 leaves nobody to generate. Give -n a number, or --nodes more.")
    if plan.models:
        raise UsageError("--ray is for `train`. Leave it out.")
    if VARIABLE in env:
        raise UsageError(
            "The setup function comes from Python, and nodes get files: write it into a file, and name that file."
        )
    if plan.trl is not None:
        raise UsageError(
            "--ray needs a setup file with get_trainer(), which is sent to the nodes; the arguments of `trl grpo` name "
            "files of this machine. `async-grpo init` writes a setup file."
        )
    if plan.work.server_devices is not None:
        raise UsageError("--server-devices names GPUs of this machine, and with --ray there are others. Leave it out.")
    if launch.trainer_nodes > 1:
        _check_ranks(launch)
    packed(plan.config)


def _check_ranks(launch: LaunchSettings) -> None:
    """Raise `UsageError` where Ray cannot start the trainer's ranks of other machines."""
    ranks = AccelerateConfig.read(launch.accelerate_config)
    has_place = ranks.machine > 0 or launch.machine_rank is not None or launch.main_process is not None
    for is_wrong, why in (
        (launch.ray == "local", "--ray local is of this machine alone. Take a cluster of several: --ray auto."),
        (has_place, "Ray says which machine is which. Leave out --machine-rank (machine_rank) and --main-process."),
        (
            ranks.machines != launch.trainer_nodes,
            f"the file of --accelerate-config has num_machines: {ranks.machines}. Give both the same number.",
        ),
    ):
        if is_wrong:
            raise UsageError(f"--trainer-nodes {launch.trainer_nodes}: {why}")


def require_ray() -> None:
    """Raise `UsageError` unless the Ray is installed that this was written for."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise UsageError("--ray needs Ray, which is not installed here: pip install 'async-grpo[ray]'") from None
    if not found.startswith(f"{RAY}."):
        raise UsageError(
            f"--ray needs Ray {RAY}, and {found} is installed here: pip install 'async-grpo[ray]'. Another version may "
            "treat tokens and addresses differently."
        )
