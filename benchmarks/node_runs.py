"""What nodes cost a whole run, for `nodes.py`: rollouts a second, the trainer's step, and how fast a loss is seen."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from benchmarks.contests import SLOW_REWARD, TWICE, say
from benchmarks.queue_cycles import RUN, make_job
from benchmarks.setups.sums import Setting
from benchmarks.sides import Run, Side, run_side
from benchmarks.table import Row, row

from async_grpo.errors import PeerDiedError
from async_grpo.nodes.cluster import RayNode
from async_grpo.nodes.seat import FarNodeSeat
from async_grpo.nodes.sending import PublishedVersions
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.telemetry.activity import Activity
from async_grpo.telemetry.nodes_file import NodeRecord

FAR = ("--workers-per-node", "1", "--ray", "local", "--nodes")
TWO_LOCAL = Side(name="2 local workers", workers=2, threads=1)
ONE_FAR = Side(name="1 local and 1 far worker", workers=1, threads=1, flags=(*FAR, "2"))
THREE_LOCAL = Side(name="3 local workers", workers=3, threads=1)
TWO_NODES = Side(name="1 local worker and 2 nodes of one", workers=1, threads=1, flags=(*FAR, "3"))
DEMO = Setting(steps=400)
COMPARISONS = (  # what, setting, with nodes, without, whether the ratio is one of speeds, target
    ("rollouts/s, 1 local and 1 far worker over 2 local ones, the demo", DEMO, ONE_FAR, TWO_LOCAL, True, ">= 0.75"),
    (
        "rollouts/s, 1 local and 1 far worker over 2 local ones, rewards that wait",
        replace(SLOW_REWARD, accuracy=False, steps=80),
        ONE_FAR,
        TWO_LOCAL,
        True,
        ">= 0.95",
    ),
    (
        "a step of a busy trainer, 1 local worker and 2 nodes of one over 3 local ones",
        replace(TWICE, steps=120),
        TWO_NODES,
        THREE_LOCAL,
        False,
        "<= 1.1",
    ),
)
HELD = 8  # jobs that the lost node has
LOST_S = 60.0
SETTLE_S = 5.0  # for Ray's agents to end, before the next run


def comparisons(rounds: int) -> Iterator[Row]:
    """Ratios of runs that take turns, with nodes and without. A step of those without is the control of equal work."""
    for name, setting, far, near, is_speed, target in COMPARISONS:
        steps: dict[Side, list[float]] = {far: [], near: []}
        for repeat in range(rounds):
            for side in (far, near) if repeat % 2 else (near, far):
                with tempfile.TemporaryDirectory() as folder:
                    steps[side].append(late_step_s(side, run_side(side, setting, Path(folder) / "run")))
                say(f"{name}: {side.name}: {steps[side][-1]:.3f} s a step")
                time.sleep(SETTLE_S)
        pairs = zip(steps[far], steps[near], strict=True)
        ratios = [without / with_nodes if is_speed else with_nodes / without for with_nodes, without in pairs]
        yield row(name, ratios, "x", target=target, controls=steps[near])


def late_step_s(side: Side, run: Run) -> float:
    """Seconds of a step in the later half of a run, when its nodes must be there."""
    logs = run.logs[len(run.logs) // 2 :]
    if "--ray" in side.flags and not logs[0].get("nodes/alive"):
        raise RuntimeError(f"{side.name}: no node joined in the first half of the run: give its setting more steps")
    return float((logs[-1]["monotonic_s"] - logs[0]["monotonic_s"]) / (logs[-1]["step"] - logs[0]["step"]))


def memory_of_ray() -> int:
    """Bytes of Ray's own processes below this one, those that are shared divided between them (PSS)."""
    processes = psutil.Process().children(recursive=True)
    return sum(process.memory_full_info().pss for process in processes if "StandIn" not in process.cmdline()[0])


def pending_again_s(node: RayNode, pid: int, versions: PublishedVersions, *, is_frozen: bool) -> float:
    """From the death of a node, or from when it freezes, until the server has its claims pending again.

    Args:
        pid: of the actor, which holds all its jobs; it and its raylet, its parent, are killed or stopped.
    """
    processes = [psutil.Process(pid), psutil.Process(psutil.Process(pid).ppid())]
    with tempfile.TemporaryDirectory() as root, closing(ServerQueue.open(root, RUN)) as server:
        for seq in range(HELD):
            server.submit(make_job(seq))
        goes_on = threading.Event()
        goes_on.set()
        seat = threading.Thread(target=_serve, args=(Path(root), node, versions, goes_on))
        seat.start()
        _until(lambda: len(_claims(root)) == HELD, server)
        time.sleep(1.0)  # an exchange waits in the actor, as always
        began = time.perf_counter()
        for process in processes:
            process.send_signal(signal.SIGSTOP if is_frozen else signal.SIGKILL)
        try:
            _until(lambda: not _claims(root), server)
            seconds = time.perf_counter() - began
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            seat.join()
    return seconds


def _serve(root: Path, node: RayNode, versions: PublishedVersions, goes_on: threading.Event) -> None:
    """What the gate does for a node, until it is lost."""
    try:
        with closing(WorkerQueue.open(root, 8, "x", far_workers=8)) as queue:
            FarNodeSeat(
                node,
                queue,
                versions,
                RunPlan(config=Path("setup.py")),
                name="node8",
                workers=8,
                states=root / "none",
                log=root / "log.txt",
                activity=Activity(),
                figures=NodeRecord(),
            ).serve(goes_on)
    except PeerDiedError:
        return


def _claims(root: str) -> list[Path]:
    return list((Path(root) / "queue").glob("*_processing_by_*"))


def _until(condition: Any, server: ServerQueue) -> None:
    deadline = time.monotonic() + LOST_S
    while not condition():
        assert time.monotonic() < deadline, "the server does not get the jobs of a lost node back"
        server.wait(0.02)
