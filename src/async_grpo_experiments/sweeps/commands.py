"""The process of a run: its command line and its environment, by the mode of the sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from async_grpo.errors import UsageError
from async_grpo.records import WorkerId
from async_grpo.rundir.paths import FINISHED, RunDir
from async_grpo.serving.vllm_server import is_free
from async_grpo.settings import as_flags
from async_grpo.setup.devices import physical_gpus
from async_grpo.setup.generator_choice import STARTED_SERVER
from async_grpo.setup.process import path_to_us
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import Command
from async_grpo_experiments.sweeps.plan import ASYNC, OWN_SETTINGS, Run
from async_grpo_experiments.sweeps.preflight import Preflight

PROGRAM = (sys.executable, "-Pm", "async_grpo.cli")
CACHES = {  # by environment variable: compilers write there, and two that share a folder can clash
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "UNSLOTH_COMPILE_LOCATION": "unsloth",
}
_SHARED_BY_MISTAKE = (
    "CUDA_IPC_HANDLE_PATH",
    "WORKER_DEVICE",
    "WANDB_RUN_ID",
)  # one value for all runs would make them meet


def command(run: Run, place: Place, found: Preflight, say: Callable[[str], None]) -> Command:
    """How the run is started in this place: from its beginning, or from where it was stopped.

    A run that starts vLLM servers gets its own port, or the next free one.
    """
    common = _common(run, found.model)
    arguments = _async(run, place, common) if run.sweep.mode == ASYNC else _trl(run, place, common, serves=found.serves)
    if found.serves:
        port, group_port = _free_ports(run.port_pairs(), what=run.name, say=say)
        arguments += ["--set", f"vllm_server_port={port}", "--set", f"vllm_group_port={group_port}"]
        _name_server_log(run, place)
    log = run.training_log(place)
    log.parent.mkdir(parents=True, exist_ok=True)
    run.output.mkdir(parents=True, exist_ok=True)
    env = environment(run, os.environ, offline=found.offline)
    return Command([*PROGRAM, *arguments], place.environment(env), log)


def _async(run: Run, place: Place, common: Sequence[str]) -> list[str]:
    began = ["--resume"] if _has_begun(run) else []
    device = [] if place.gpus else ["--master-device-id", "cpu"]
    return ["train", run.sweep.setup, "--distributed", *device, *began, *common]


def _trl(run: Run, place: Place, common: Sequence[str], *, serves: bool) -> list[str]:
    """The trainer has the first GPU of the place, and its server the others."""
    device = ["--device", "0" if place.gpus else "cpu"]
    server = ["--generator", STARTED_SERVER.name] if serves else []
    if serves and place.gpus:
        server += ["--server-devices", ",".join(physical_gpus(place.gpus[1:], os.environ))]
    return ["train", run.sweep.setup, *device, *server, *common]


def _name_server_log(run: Run, place: Place) -> None:
    """Let the server's output, which is in the run directory, be found next to the run's."""
    written = RunDir(run.run_dir)
    log = written.server_of_worker_log(WorkerId(1)) if run.sweep.mode == ASYNC else written.vllm_server_log
    link = run.server_log(place)
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        link.symlink_to(log)


def _common(run: Run, model: str) -> list[str]:
    """The settings of a run that are its own, and those that were chosen for all."""
    training, work = run.training(model), run.sweep.work
    arguments = ["--run-dir", str(run.run_dir), *as_flags("num_workers", run.sweep.num_workers)]
    for name in (*OWN_SETTINGS, *run.sweep.given):
        arguments += as_flags(name, getattr(training if hasattr(training, name) else work, name))
    return arguments


def _has_begun(run: Run) -> bool:
    """Whether there is a run to continue."""
    state = RunDir(run.run_dir).read_state()
    return state is not None and state.state != FINISHED


def environment(run: Run, env: Mapping[str, str], *, offline: bool) -> dict[str, str]:
    """The variables of this run: caches and names of its own."""
    mine = {name: value for name, value in env.items() if name not in _SHARED_BY_MISTAKE}
    mine |= {name: str(run.caches / folder) for name, folder in CACHES.items()}
    mine |= {
        "PYTHONPATH": path_to_us(env),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": str(run.seed % 2**32),
        "WANDB_DIR": str(run.output),
    }
    if run.sweep.dataset is not None:
        mine["DATASET"] = run.sweep.dataset
    if offline:
        mine["WANDB_MODE"] = "offline"
    mine.setdefault("TQDM_DISABLE", "1")
    return mine


def _free_ports(pairs: Sequence[tuple[int, int]], *, what: str, say: Callable[[str], None]) -> tuple[int, int]:
    """The first pair of which both ports are free. Says which are taken.

    Raises:
        UsageError: no pair is free.
    """
    for pair in pairs:
        taken = [port for port in pair if not is_free(port)]
        if not taken:
            if pair != pairs[0]:
                say(f"{what} takes the next free ports, {pair[0]} and {pair[1]}")
            return pair
        if pair == pairs[0]:
            say(f"{what}: port {' and '.join(map(str, taken))} is taken by another program")
    first, last = pairs[0], pairs[-1]
    raise UsageError(
        f"{what}: of all ports from {first[0]} to {last[0]}, none is free together with its group port. Choose "
        "another --base-port."
    )
