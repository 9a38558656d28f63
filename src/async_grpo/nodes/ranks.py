"""The trainer's ranks on other machines of a Ray cluster: `python -m async_grpo.nodes.ranks PID RUN_DIR …`.

`launch.accelerate_entry` of machine 0, the server's, with a connection to Ray. An actor on each other machine does what
the command that would be typed there does. The actors and their places end with this process, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path

from async_grpo.errors import UsageError
from async_grpo.launch import accelerate_entry
from async_grpo.nodes.cluster import CPUS_A_WORKER, Cluster
from async_grpo.nodes.seat import words_of
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.rundir.reading import parse_object
from async_grpo.rundir.shape import as_json, shaped
from async_grpo.setup.accelerate_config import AccelerateConfig
from async_grpo.setup.devices import CPU
from async_grpo.setup.process import end_with_parent, run_as_rank
from async_grpo.setup.setup_file import check_setup_file
from async_grpo.training.machines import TrainerMachine

END_S = 15.0  # for the other machines to leave, within what the launcher grants for it


class RanksThere:
    """The actor of another machine. Its ranks end with it, and the server's log gets what they print."""

    def ready(self) -> None: ...

    def run(self, state: str, number: int, root: str, folder: str) -> int:
        """Be this machine of the trainer to the end of the training; the exit code of its ranks."""
        os.environ.pop("OMP_NUM_THREADS", None)  # it is Ray's
        if Path(folder).is_dir():
            os.chdir(folder)
        plan = shaped(RunState, parse_object(state)).plan
        check_setup_file(plan.config)
        here = TrainerMachine(number, plan.launch.trainer_nodes, plan.launch.main_process or "")
        return accelerate_entry.join(Path(root), plan, here)


def main(arguments: Sequence[str]) -> int:
    """Be machine 0, with the others on Ray; the exit code."""
    end_with_parent(int(arguments[0]))
    run = RunDir(Path(arguments[1]))
    state = run.state_of(None)
    plan, launch = state.plan, state.plan.launch
    each = AccelerateConfig.read(launch.accelerate_config).processes // launch.trainer_nodes
    needs = {"CPU": CPUS_A_WORKER * each, **({} if plan.master_device == CPU else {"GPU": each})}
    with accelerate_entry.refusing(run, state.run_id):
        cluster = Cluster(launch.ray or "", nodes=1, cpus=0, run_id=state.run_id, shows_output=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler would end this with another exit code
        address = f"{cluster.here}:{free_port(cluster.here)}"
        state = run.update_state(plan=replace(plan, launch=replace(launch, main_process=address)))
        actors = cluster.start_ranks(RanksThere, launch.trainer_nodes - 1, needs, address, launch.node_wait)
    order = json.dumps(as_json(state))
    orders = [(order, number, str(run.root), str(Path.cwd())) for number in range(1, launch.trainer_nodes)]
    ends = [actor.run.remote(*order).future() for actor, order in zip(actors, orders, strict=True)]
    begun = threading.Event()
    threading.Thread(target=_watch_start, args=(ends, begun, run, state.run_id), daemon=True).start()
    code = accelerate_entry.main(arguments, begun.set)
    wait(ends, END_S)
    return code


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _watch_start(ends: list[Future[int]], begun: threading.Event, run: RunDir, run_id: str) -> None:
    """End this process where another machine ends before all are there. Later the heartbeats say who is gone."""
    first = wait(ends, return_when=FIRST_COMPLETED).done.pop()
    if not begun.is_set() and (lost := first.exception()) is not None:
        why = getattr(lost, "cause", lost)  # what was raised there
        with accelerate_entry.refusing(run, run_id):
            raise UsageError(f"Machine {ends.index(first) + 1} has not started its ranks: {words_of(why)}")


if __name__ == "__main__":
    from async_grpo.nodes import ranks  # the actor's class is that of the module

    run_as_rank(lambda: ranks.main(sys.argv[1:]))
