"""Starts the parameter server as several processes: `python -m async_grpo.launch.accelerate_entry PID RUN_DIR …`.

`accelerate launch`, held to the life of the launcher with process id PID: accelerate's own command would outlive it.
On several machines, this process of machine 0 holds the store that `training.machines` meets in, and each other machine
has `join` in the place of a launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from async_grpo.errors import AsyncGRPOError, UsageError, reason_of
from async_grpo.launch.launcher import environment
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.paths import FAILED, FINISHED, KEEP_LAST_WEIGHTS, RunDir, RunState
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.rundir.shape import as_json, shaped
from async_grpo.settings import LaunchSettings
from async_grpo.setup.accelerate_config import DEEPSPEED, AccelerateConfig
from async_grpo.setup.devices import physical_gpus
from async_grpo.setup.fingerprints import versions
from async_grpo.setup.process import StopRequest, end_with_parent, leave_at_once, run_as_rank
from async_grpo.training import machines
from async_grpo.training.machines import Heartbeat, TrainerMachine

EQUAL = ("torch", "transformers", "trl", "accelerate", "peft")  # on all machines


def machine_of(plan: RunPlan) -> TrainerMachine | None:
    """Which of the trainer's machines this is; None where there is one.

    Raises:
        UsageError: the command line or the accelerate configuration does not say it, or cannot mean it.
    """
    config, launch = plan.launch.accelerate_config, plan.launch
    ranks = AccelerateConfig.read(config)
    if ranks.machines == 1:
        if launch.machine_rank is not None or launch.main_process is not None:
            raise UsageError(
                "--machine-rank, --main-process: the trainer is on one machine. Name the number of machines "
                "(num_machines) in the file of --accelerate-config, or leave this out."
            )
        return None
    number = ranks.number_of(launch.machine_rank)
    here = TrainerMachine(number, ranks.machines, launch.main_process or ranks.main_process)
    if not here.address and launch.trainer_nodes == 1:
        raise UsageError(f"{config} has {ranks.machines} machines: say where machine 0 is, --main-process HOST:PORT.")
    if not 0 <= number < ranks.machines or ranks.processes % ranks.machines:
        raise UsageError(
            f"{config} has {ranks.machines} machines and {ranks.processes} processes, and this is machine {number}. "
            "Machines count from 0, and each has as many of the processes (num_processes counts all)."
        )
    if ranks.kind == DEEPSPEED:
        raise UsageError("DeepSpeed on several machines is not supported. FSDP2 shards as ZeRO-3 does: take that.")
    if plan.trl is not None or KEEP_LAST_WEIGHTS in os.environ:
        raise UsageError(
            "A trainer on several machines is started by a command, with a setup file that each machine has. "
            "Arguments of `trl grpo`, and runs from Python, are of this one. `async-grpo init` writes a setup file."
        )
    return here


def join(root: Path, plan: RunPlan, here: TrainerMachine) -> int:
    """Be another machine of the trainer, from the roll call to the end of the training.

    Args:
        root: of the run on machine 0; the folder with this machine's own record has its number in its name.
        plan: what this machine's command line says.

    Raises:
        UsageError: machine 0 is not there, or has refused.
    """
    wait_s = plan.launch.node_wait
    print(f"machine {here.number} of {here.count}: asking {here.address}", flush=True)
    has_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL  # else nohup has set it
    ends = [signal.SIGTERM, signal.SIGHUP] if has_terminal else [signal.SIGTERM]
    for number in ends:
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: machine 0 is then not to count on this one
    answer = machines.answer_roll(machines.reach(here, wait_s), here, _about(plan), wait_s)
    stop = StopRequest().install()
    stop.defer()
    for number in ends:
        signal.signal(number, signal.getsignal(signal.SIGINT))
    heartbeat = Heartbeat.of_machine(here, stop=stop)
    try:
        state = shaped(RunState, answer["state"])
        run = RunDir(make_folder(root.with_name(f"{root.name}-machine{here.number}")))
        theirs = replace(state.plan.launch, accelerate_config=plan.launch.accelerate_config, machine_rank=here.number)
        own = replace(
            state.plan, config=plan.config, launch=theirs, master_device=plan.master_device, worker_devices=()
        )
        run.write_state(replace(state, plan=own, **run.where_it_is()))
        print(f"run {state.run_id} of {answer['name']} ({here.address}); this machine's record: {run.root}", flush=True)
        os.environ.update(environment(own))
        code = _start_ranks(own, ["server", "--run-dir", str(run.root)], heartbeat)
    except Exception as error:
        heartbeat.say_ended(f"{heartbeat.me} has not started its ranks: {reason_of(error)}")
        raise
    run.update_state(state=FINISHED if code == 0 else FAILED)
    print("the training has ended" if code == 0 else "this machine's ranks have failed", flush=True)
    return code


def _about(plan: RunPlan) -> dict[str, Any]:
    """What machine 0 compares."""
    config = AccelerateConfig.read(plan.launch.accelerate_config)
    ranks = [config.machines, config.processes, config.kind, config.fsdp_version]
    setup = sha256(plan.config.read_bytes()).hexdigest()
    return {"name": socket.gethostname(), "versions": versions(*EQUAL), "setup": setup, "ranks": ranks}


def _gpu_options(launch: LaunchSettings, env: Mapping[str, str]) -> list[str]:
    """accelerate sets CUDA_VISIBLE_DEVICES to its `gpu_ids`. Ours count within the devices that are visible already.

    On other nodes of Ray's those of the file do not count: the ranks have what Ray gives them.
    """
    indices = AccelerateConfig.read(launch.accelerate_config).gpus
    if not indices or (visible := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return []
    given = launch.trainer_nodes > 1 and launch.machine_rank is not None
    return ["--gpu_ids", visible if given else ",".join(physical_gpus(indices, env))]


def _start_ranks(plan: RunPlan, command: Sequence[str], heartbeat: Heartbeat | None) -> int:
    """Run this machine's ranks to their end; their exit code. `heartbeat`: where there are other machines."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    config = plan.launch.accelerate_config
    assert config is not None, "there are ranks"
    ranks = ["--config_file", str(config), "--main_process_port", "0", *_gpu_options(plan.launch, os.environ)]
    launched = ["--no_python", sys.executable, "-Pm", "async_grpo.cli", *command, "--launched-by", str(os.getpid())]
    asked = launch_command_parser().parse_args([*ranks, *launched])
    if heartbeat is not None:
        here = heartbeat.here
        asked.machine_rank, asked.main_process_ip, asked.same_network = here.number, here.host, True
        asked.rdzv_backend, asked.rdzv_endpoint = "static", here.address  # torch shares the store: machine 0 has it
        os.environ.update({machines.ADDRESS: here.address, **machines.interface_of(here, os.environ)})
        if here.number > 0:  # Ctrl-C here stops the whole run: rank 0 hears of it, and writes a checkpoint first
            asked.signals_to_handle = "SIGQUIT"  # of others torch would end this machine's ranks
    try:
        launch_command(asked)
    except SignalException as stopped:
        if heartbeat is not None:
            heartbeat.say_stopped()
        return 0 if stopped.sigval in (signal.SIGTERM, signal.SIGINT) else 1
    except ChildFailedError as failed:  # each rank has said why in the log
        rank, failure = failed.get_first_failure()
        if heartbeat is not None:
            heartbeat.say_ended(f"rank {rank} on {heartbeat.me} ended with exit code {failure.exitcode}")
        return abs(failure.exitcode)
    if heartbeat is not None:
        heartbeat.leave()
    return 0


@contextmanager
def refusing(run: RunDir, run_id: str) -> Iterator[None]:
    """End this process at an error of ours in the block, which is said to be why the run has failed."""
    try:
        yield
    except AsyncGRPOError as error:
        run.note_failure(run_id, reason_of(error))
        print(f"error: {error}", file=sys.stderr)
        leave_at_once(error.exit_code)


def main(arguments: Sequence[str], all_there: Callable[[], None] = lambda: None) -> int:
    """Be machine 0 of the trainer, or the only one; the exit code. `all_there` is called after the roll call."""
    parent_pid, root, *command = arguments
    end_with_parent(int(parent_pid))
    run = RunDir(Path(root))
    state, heartbeat = run.state_of(None), None
    with refusing(run, state.run_id):
        if (here := machine_of(state.plan)) is not None:
            store = machines.hold(here)  # to the end: ranks meet there
            answer = {"state": as_json(state), "name": socket.gethostname()}
            machines.call_roll(store, here, _about(state.plan), answer, state.plan.launch.node_wait)
            all_there()
            heartbeat = Heartbeat.of_machine(here, failed=partial(run.note_failure, state.run_id))
        try:
            code = _start_ranks(state.plan, command, heartbeat)
        except Exception as error:
            if heartbeat is not None:
                heartbeat.say_ended(f"{heartbeat.me} has not started its ranks: {reason_of(error)}")
            raise
    return code


if __name__ == "__main__":
    run_as_rank(lambda: main(sys.argv[1:]))
