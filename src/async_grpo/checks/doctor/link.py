"""The link between the machines of a trainer: the roll call of a start, then 64 MB from each machine to all others.

`python -m async_grpo.checks.doctor.link` is this machine's part, in a process of its own: a collective may hang.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from async_grpo.checks import probe
from async_grpo.checks.doctor.finding import Asked, Finding, Level
from async_grpo.errors import AsyncGRPOError
from async_grpo.launch.accelerate_entry import EQUAL
from async_grpo.setup.fingerprints import versions
from async_grpo.training import machines
from async_grpo.training.machines import TrainerMachine

if TYPE_CHECKING:
    from async_grpo.nodes.cluster import Cluster, Machine

SENT_BYTES = 64_000_000
REPEATS = 3
COLLECTIVE_S = 60.0  # of gloo, for each of its operations
TIMEOUT_S, EACH_S = 180.0, 10.0  # of all after the roll call, and for each machine
_AGAIN = "Correct that, and start this on all machines."
_ROUTE = "Open all ports between the machines, or name another interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."


def trainer_link(asked: Asked) -> Iterator[Finding]:
    """Measure what each of the trainer's machines sends to all others. The same command runs on each."""
    if (here := asked.machine) is None:
        return
    question = {"here": asdict(here), "wait_s": asked.node_wait}
    try:
        level, found, fix = probe.ask(
            "async_grpo.checks.doctor.link", question, timeout_s=asked.node_wait + TIMEOUT_S + EACH_S * here.count
        )
    except probe.ChildFailed as failure:
        level, found, fix = Level.ERROR, str(failure), _ROUTE
    yield Finding(Level(level), "link", f"machine {here.number} of {here.count}, at {here.address}: {found}", fix)


def link_of_cluster(asked: Asked, found: Cluster, machines: Sequence[Machine]) -> Iterator[Finding]:
    """Measure it between this machine and those of a Ray cluster, on a GPU each where they have some."""
    from async_grpo.nodes.cluster import CPUS_A_WORKER
    from async_grpo.nodes.ranks import free_port

    count, address = len(machines) + 1, f"{found.here}:{free_port(found.here)}"
    needs = {"CPU": CPUS_A_WORKER, **({"GPU": 1} if all(machine.gpus for machine in machines) else {})}
    actors = found.start_ranks(LinkThere, count - 1, needs, address, asked.node_wait)
    here, *others = (TrainerMachine(number, count, address) for number in range(count))
    for actor, machine in zip(actors, others, strict=True):
        actor.look.remote({"here": asdict(machine), "wait_s": asked.node_wait})
    yield from trainer_link(replace(asked, machine=here))


class LinkThere:
    """The actor of another machine, which ends with the process that asks."""

    def ready(self) -> None: ...

    def look(self, question: dict[str, Any]) -> None:
        """Do what the command that would be typed there does; what it finds is said by machine 0."""
        _look(question)


def _look(question: dict[str, Any]) -> tuple[Level, str, str]:
    """The level, what was found, and the fix."""
    import torch

    here, wait_s = TrainerMachine(**question["here"]), question["wait_s"]
    mine = {"name": socket.gethostname(), "versions": versions(*EQUAL), "setup": "", "ranks": []}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        store = machines.hold(here) if here.number == 0 else machines.reach(here, wait_s)
        if here.number == 0:
            machines.call_roll(store, here, mine, {"backend": backend}, wait_s)
        else:
            backend = machines.answer_roll(store, here, mine, wait_s)["backend"]
    except AsyncGRPOError as refusal:
        return Level.ERROR, str(refusal), _AGAIN
    os.environ.update(machines.interface_of(here, os.environ))
    way = f"{backend} on {os.environ.get(f'{backend.upper()}_SOCKET_IFNAME', 'any interface')}"
    try:
        rates = [f"{rate:.2f} GB/s from machine {number}" for number, rate in enumerate(_rates(here, store, backend))]
    except (RuntimeError, ValueError) as failure:  # torch's
        return Level.ERROR, f"{way} failed: {' '.join(str(failure).split())}", _ROUTE
    return Level.OK, f"{SENT_BYTES // 10**6} MB to all others by {way}: {', '.join(rates)}", ""


def _rates(here: TrainerMachine, store: Any, backend: str) -> list[float]:
    """GB/s from each machine to all others, the fastest of a few times; the first opens the connections."""
    import torch
    import torch.distributed as dist

    data = torch.zeros(SENT_BYTES, dtype=torch.uint8, device="cuda" if backend == "nccl" else "cpu")
    store.set_timeout(timedelta(seconds=COLLECTIVE_S))  # a GPU may need long for its first tensor
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("link", store),  # type: ignore[attr-defined]  # documented there, and not exported
        rank=here.number,
        world_size=here.count,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    rates = []
    for source in range(here.count):
        taken = []
        for _ in range(1 + REPEATS):
            began = time.monotonic()
            dist.broadcast(data, src=source)
            dist.barrier()  # all have it
            taken.append(time.monotonic() - began)
        rates.append(SENT_BYTES / min(taken[1:]) / 1e9)
    return rates


if __name__ == "__main__":
    probe.answer(_look)
