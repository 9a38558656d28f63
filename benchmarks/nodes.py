"""Workers on other machines: what Ray and the gate cost, on a cluster of this machine.

    .venv-ray/bin/python benchmarks/nodes.py [--only way|runs] [--rounds 5] [--json FILE] [--plot FILE] [--update-docs]

`way`, 3 minutes, and `runs`, 25; of what is not measured again, the rows of the JSON file are kept. Stand-ins are
actors that answer at once: a group a job, so that nothing but the way is measured. All raylets, the gate
and the server's side share the cores of this machine, so a figure is a lower bound of what machines of their own do.
Whole runs with nodes and without take turns (`node_runs.py`): where a run without took more than a tenth longer at one
time than at another, the row says "not measurable here". The table of many nodes is a formula of the costs measured
here, and says which part is at its limit first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.control import PAIRS
from benchmarks.node_runs import comparisons, memory_of_ray, pending_again_s
from benchmarks.queue_cycles import RUN, make_group, make_job
from benchmarks.table import Row, as_text, keep, row, update_docs

from async_grpo.deltas.delta import encode, pack
from async_grpo.deltas.tensors import as_words
from async_grpo.nodes.cluster import (
    EXCHANGE,
    LOCAL_ADDRESS,
    LOCAL_STORE_BYTES,
    WEIGHTS,
    Cluster,
    Machine,
    RayNode,
    fetched,
)
from async_grpo.nodes.receiving import ReceivedWeights
from async_grpo.nodes.seat import FarNodeSeat
from async_grpo.nodes.sending import PublishedVersions, WeightsPiece
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.queue.codec import decode_job, encode_group
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.setup.process import end_with_parent, path_to_us
from async_grpo.telemetry.activity import Activity
from async_grpo.telemetry.nodes_file import NodeRecord
from async_grpo_ipc import WeightExporter

RESULTS = Path(__file__).with_name("results") / "nodes.json"
GROUPS = 1500
TOKENS = 60  # of each of 16 completions: a file of some 8 KiB
WHOLE_BYTES = 64 * 2**20
WARM_UP = 4  # versions that touch the memory of all slots, there and here, for the first time
VERSIONS_A_ROUND = 4
ELSEWHERE = -1  # a version from which no difference leads
WEIGHTS_OF_A_DELTA = 20_000_000
ENCODED = 3  # times; the fastest counts, as of the bytes of the way
FETCH_S = 120.0
MODELS = {"1 B": 1e9, "32 B": 32e9}
NODES = (1, 3, 10, 30, 100, 300, 1000)
BYTES_A_WEIGHT = 2
STEP_S = 30.0  # of the trainer, in the table of many nodes
GROUPS_A_NODE = 4.0  # a second
HOLDER = """
import sys, time
from pathlib import Path
from async_grpo.queue import WorkerQueue
queue = WorkerQueue.open(Path(sys.argv[1]), 8, "x", far_workers=2)
while not queue.claim(1):
    time.sleep(0.01)
print("has it", flush=True)
time.sleep(600)
"""


class StandIn:
    """An actor in the place of `FarNode`: it has answered every job before it is asked."""

    def __init__(self, folder: str, works: bool) -> None:
        end_with_parent(os.getppid(), signal.SIGKILL)  # the raylet, as `FarNode`
        self._weights = ReceivedWeights(Path(folder) / f"{os.getpid()}.json", workers=1)
        self._works = works

    def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def exchange(self, jobs: list[tuple[int, int, bytes]], states: bytes) -> dict[str, Any]:
        made = [decode_job(data) for _, _, data in jobs if self._works]
        return {
            "groups": [(job.seq, encode_group(make_group(job, 0, "dev1", tokens=TOKENS))) for job in made],
            "failures": [],
            "log": [],
            "workers": 8,
            "scored": 0,
            "version": 0,
            "refused": "",
            "gave_up": "",
            "waited_s": 0.0,
        }

    def receive(self, about: dict[str, Any], data: list[Any]) -> dict[str, Any]:
        if about["kind"] == "none":
            return {"published": 0, "why": "", "busy": False, "late": False}
        arrived = fetched(data[0], FETCH_S)
        assert arrived is not None, "no weights arrive"
        if about["kind"] == "bare":
            np.array(arrived)
            return {"published": 0, "why": "", "busy": False, "late": False}
        return {**self._weights.receive(about, arrived), "late": False}


class NoWeights(PublishedVersions):
    """One version of a server whose weights are not measured: a node has it at once, and asks no more."""

    def __init__(self) -> None: ...

    def newest(self) -> int:
        return 0

    def pieces(self, since: int | None) -> Iterator[WeightsPiece]:
        yield WeightsPiece({"kind": "none"}, b"", 0)


def stand_ins(cluster: Cluster, folder: Path, machines: list[Machine], *, works: bool = True) -> list[RayNode]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = cluster._ray.remote(concurrency_groups={EXCHANGE: 2, WEIGHTS: 1})(StandIn)
    nodes = [NodeAffinitySchedulingStrategy(machine.node_id, soft=False) for machine in machines]
    handles = [actor.options(num_cpus=0.5, scheduling_strategy=node).remote(str(folder), works) for node in nodes]
    nodes = [RayNode(handle, cluster._ray) for handle in handles]
    for node in nodes:
        node.exchange([], b"").result(300)
    return nodes


def lost_nodes(cluster: Cluster, folder: Path, rounds: int, *, is_frozen: bool) -> list[float]:
    """Seconds until the jobs of a lost machine are pending again. Each round makes a machine, which it ends."""
    like_others: dict[str, Any] = {"node_ip_address": LOCAL_ADDRESS, "object_store_memory": LOCAL_STORE_BYTES}
    taken = []
    for number in range(rounds):
        name = f"lost-{is_frozen}-{number}"
        cluster._local.add_node(**like_others, include_dashboard=False, num_gpus=0, num_cpus=1, node_name=name)
        (node,) = stand_ins(cluster, folder, [one for one in cluster.machines() if one.name == name], works=False)
        pid = node.facts().result(60)["pid"]
        taken.append(pending_again_s(node, pid, NoWeights(), is_frozen=is_frozen))
    return taken


def exchange_ms(node: RayNode, times: int = 200) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        node.exchange([], b"").result(60)
        taken.append(1000 * (time.perf_counter() - began))
    return taken


def groups_per_s(nodes: list[RayNode], folder: Path) -> float:
    """Groups that two nodes of stand-ins hand to the server's queue, and it takes."""
    plan = RunPlan(config=Path("setup.py"))
    goes_on = threading.Event()
    goes_on.set()
    with tempfile.TemporaryDirectory(dir=folder) as root, closing(ServerQueue.open(root, RUN)) as server:
        for seq in range(GROUPS):
            server.submit(make_job(seq))

        def serve(number: int, node: RayNode) -> None:
            with closing(WorkerQueue.open(root, number, "x", far_workers=8)) as queue:
                FarNodeSeat(
                    node,
                    queue,
                    NoWeights(),
                    plan,
                    name=f"node{number}",
                    workers=8,
                    states=Path(root) / "none",
                    log=Path(root) / "log.txt",
                    activity=Activity(),
                    figures=NodeRecord(),
                ).serve(goes_on)

        threads = [threading.Thread(target=serve, args=(8 + index, node)) for index, node in enumerate(nodes)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        taken = 0
        while taken < GROUPS:
            server.wait(0.5)
            taken += sum(server.take(name) is not None for name in server.finished())
        seconds = time.perf_counter() - began
        goes_on.clear()
        for thread in threads:
            thread.join()
    return GROUPS / seconds


def whole_version(cluster: Cluster, node: RayNode, folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds for a version to be published on a node, and for a bare put, get and copy of as many bytes."""
    tensors = {str(index): torch.randn(2**20) for index in range(WHOLE_BYTES // 2**22)}
    ours, bare = [], []
    with WeightExporter.from_tensors(tensors, folder / f"server-{time.monotonic_ns()}.json", slots=3) as exporter:
        exporter.publish(0)
        versions = PublishedVersions(exporter.path, cluster.put)
        for version in range(1, WARM_UP + VERSIONS_A_ROUND * rounds + 1):
            for tensor in tensors.values():
                tensor.normal_()
            exporter.publish(version)
            assert versions.newest() == version
            began = time.perf_counter()
            for piece in versions.pieces(None if version == 1 else ELSEWHERE):
                answer = node.receive(piece.about, piece.data).result(120)
            ours.append(time.perf_counter() - began)
            versions.took(WHOLE_BYTES, 1e-3)  # so that no difference is encoded, which is slower here
            assert answer["published"] == version, answer
            data = np.random.default_rng(version).integers(0, 255, WHOLE_BYTES, np.uint8)
            began = time.perf_counter()
            node.receive({"kind": "bare"}, cluster.put(data)).result(120)
            bare.append(time.perf_counter() - began)
        versions.close()
    return ours[WARM_UP:], bare[WARM_UP:]


def delta_ratio(rate: float) -> tuple[float, float]:
    """How many times smaller than all bytes a version's difference is, and seconds to encode it.

    Weights are N(0, .02); an Adam step moves each by about the learning rate. The trainer has them in 32 bits.
    """
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(WEIGHTS_OF_A_DELTA, generator=generator) * 0.02
    moved = master - rate * torch.randn(WEIGHTS_OF_A_DELTA, generator=generator).sign()
    before, after = ({"w": as_words(weights.to(torch.bfloat16))} for weights in (master, moved))
    taken = []
    for _ in range(ENCODED):
        began = time.perf_counter()
        nbytes = sum(map(len, pack(encode(before, after))))
        taken.append(time.perf_counter() - began)
    return after["w"].nbytes / nbytes, min(taken)


def pending_again_ms(folder: Path) -> float:
    """From the death of a gate until the server has its claims pending again."""
    env = {**os.environ, "PYTHONPATH": path_to_us(os.environ)}
    with tempfile.TemporaryDirectory(dir=folder) as root, closing(ServerQueue.open(root, RUN)) as server:
        server.submit(make_job(1))
        with subprocess.Popen([sys.executable, "-c", HOLDER, root], env=env, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            claim = next((Path(root) / "queue").iterdir())
            began = time.perf_counter()
            holder.send_signal(signal.SIGKILL)
            while claim.exists():
                time.sleep(0.0005)
            return 1000 * (time.perf_counter() - began)


def way(rounds: int) -> tuple[list[Row], dict[str, float]]:
    rows: list[Row] = []
    here = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, path_to_us(os.environ)])  # for the actors
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, Cluster("local", nodes=3, cpus=4, run_id="bench") as cluster:
        rows.append(
            row("cluster of 3 nodes on this machine: ready", [time.perf_counter() - began], "s", target="<= 25")
        )
        folder = Path(scratch)
        nodes = stand_ins(cluster, folder, cluster.machines())
        memory = memory_of_ray() / 2**20
        rows.append(row("memory of Ray itself, 3 nodes", [memory], "MiB"))
        exchange = exchange_ms(nodes[0])
        rows.append(row("an exchange that brings nothing", exchange, "ms"))
        groups = [groups_per_s(nodes, folder) for _ in range(rounds)]
        rows.append(row("groups through the gate, 2 nodes of stand-ins", groups, "groups/s", target=">= 700"))
        ours, bare = whole_version(cluster, nodes[0], folder, rounds)
        rows.append(
            row(f"whole version of {WHOLE_BYTES >> 20} MiB, published on a node", [1000 * s for s in ours], "ms")
        )
        rows.append(row("the same bytes by a bare put, get and copy", [1000 * s for s in bare], "ms"))
        shares = [bare_s / ours_s for ours_s, bare_s in zip(ours, bare, strict=True)]
        rows.append(row("speed of the former over the latter", shares, "x", target=">= 0.7"))
        killed = lost_nodes(cluster, folder, rounds, is_frozen=False)
        rows.append(row("groups of a killed node: pending again after", killed, "s", target="<= 4"))
        frozen = lost_nodes(cluster, folder, rounds, is_frozen=True)
        rows.append(row("groups of a frozen node: pending again after", frozen, "s", target="<= 12"))
    gate = [pending_again_ms(Path(tempfile.gettempdir())) for _ in range(rounds)]
    rows.append(row("groups of a killed gate: pending again after", gate, "ms", target="<= 200"))
    encode_s = 0.0
    for rate, target in ((1e-6, ">= 30"), (1e-5, ">= 8")):
        ratio, encode_s = delta_ratio(rate)
        rows.append(
            row(f"all bytes over those of a difference, bf16, learning rate {rate:g}", [ratio], "x", target=target)
        )
    by_name = {one.name: one.value for one in rows}
    costs = {
        "exchange_ms": by_name["an exchange that brings nothing"],
        "groups_per_s": by_name["groups through the gate, 2 nodes of stand-ins"],
        "bytes_per_s": WHOLE_BYTES / min(bare),
        "delta_ratio": by_name["all bytes over those of a difference, bf16, learning rate 1e-06"],
        "encode_bytes_per_s": BYTES_A_WEIGHT * WEIGHTS_OF_A_DELTA / encode_s,
    }
    return rows, costs


def busy(nodes: int, costs: dict[str, float]) -> dict[str, float]:
    """The share of the time that each part is busy, by a formula of measured costs; over 1 it is saturated."""
    shares = {
        "gate: groups": nodes * GROUPS_A_NODE / costs["groups_per_s"],
        "gate: exchanges": nodes * max(1.0, GROUPS_A_NODE) * costs["exchange_ms"] / 1000,
    }
    for name, weights in MODELS.items():
        nbytes = weights * BYTES_A_WEIGHT
        encode_s = nbytes / costs["encode_bytes_per_s"]
        way_s = nodes * nbytes / costs["delta_ratio"] / costs["bytes_per_s"]
        shares[f"weights of {name}: encoder"] = encode_s / STEP_S
        shares[f"weights of {name}: way"] = way_s / STEP_S
    return shares


def many_nodes(costs: dict[str, float]) -> str:
    """A table of `busy` for 1 to 1,000 nodes."""
    names = list(busy(1, costs))
    lines = [f"| nodes | {' | '.join(names)} |", "|---:|" + "---:|" * len(names)]
    lines += [f"| {n:,} | {' | '.join(f'{share:.0%}' for share in busy(n, costs).values())} |" for n in NODES]
    return "\n".join(lines)


def plot(costs: dict[str, float], path: Path) -> None:
    """Draw the same, with the line above which a part is saturated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in busy(1, costs):
        axes.loglog(NODES, [busy(nodes, costs)[name] for nodes in NODES], marker="o", markersize=3, label=name)
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_xlabel("nodes")
    axes.set_ylabel("share of the time that it is busy")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("way", "runs"))
    parser.add_argument("--rounds", type=int, default=PAIRS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, help="draw the table of many nodes")
    parser.add_argument("--update-docs", action="store_true", help="write the tables into docs/nodes.md")
    args = parser.parse_args()
    measured: list[Row] = []
    costs = json.loads(args.json.read_text())["costs"] if args.json.exists() else {}
    if args.only != "runs":
        measured, costs = way(args.rounds)
        print(as_text(measured), f"\n{many_nodes(costs)}", sep="\n", flush=True)
    if args.only != "way":
        measured += comparisons(args.rounds)
    print(as_text(measured))
    keep("nodes", args.json, measured, in_docs=args.update_docs, costs=costs)
    if args.plot is not None:
        plot(costs, args.plot)
    if args.update_docs:
        update_docs("many nodes", many_nodes(costs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
