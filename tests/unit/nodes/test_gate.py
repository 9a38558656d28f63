"""The gate with machines that a test plays: which it takes, what it refuses, and when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_fakes import FakeFarNode, FakeVersions

from async_grpo.errors import PeerDiedError, UsageError
from async_grpo.nodes import gate as gates
from async_grpo.nodes.cluster import Machine
from async_grpo.nodes.gate import _Gate
from async_grpo.nodes.seat import NodeRefused
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.rundir.paths import FINISHED, RUNNING, RunDir, RunState
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import CPU, LaunchSettings, TrainingSettings
from async_grpo.telemetry.nodes_file import NodeRecord, NodesRecord, all_gone, read_nodes, write_nodes
from kit.groups import RUN, make_group, make_job
from kit.waiting import until

VERSIONS = {"torch": "2.13.0", "vllm": ""}
RAYLET = "10.0.0.1:40000"
FACTS = {"versions": VERSIONS, "cpu": "x86", "gpus": []}


class FakeActor(FakeFarNode):
    """A node that begins at once, or says why it cannot."""

    def __init__(self, why: str = "", facts: dict[str, Any] = FACTS) -> None:
        super().__init__(lambda sent, job: make_group(job))
        self._why, self._facts = why, facts

    def facts(self) -> Future[dict[str, Any]]:
        return _now(self._facts)

    def begin(self, order: dict[str, Any]) -> Future[str]:
        self.order = order
        return _now(self._why)


def _now(value: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_result(value)
    return answer


class FakeCluster:
    """These machines, and an actor on each that is started."""

    def __init__(self, *names: str, gpus: int = 0) -> None:
        self.names, self.gpus, self.head = list(names), gpus, "gpu1:6379"
        self.free_gpus = dict.fromkeys(names, gpus)
        self.make: Callable[[str], FakeActor] = lambda name: FakeActor()
        self.started: list[str] = []

    def machines(self) -> list[Machine]:
        return [
            Machine(name, name, RAYLET, 8.0, self.gpus, free_cpus=8.0, free_gpus=self.free_gpus[name])
            for name in self.names
        ]

    def start(self, machine: Machine, *, workers: int, gpus: int) -> FakeActor:
        self.started.append(machine.name)
        return self.make(machine.name)

    def put(self, data: Any) -> Any:
        return data

    def open_to_the_network(self) -> str:
        return ""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "setup.py").write_text("def get_trainer(): ...\n")
    monkeypatch.setattr(gates, "facts", lambda: FACTS)
    monkeypatch.setattr(gates, "PublishedVersions", lambda handle, put: FakeVersions())
    monkeypatch.setattr(gates, "LOOK_S", 0.01)
    monkeypatch.setattr(gates, "answers", lambda address: address in ("gpu1:6379", RAYLET))
    monkeypatch.setattr(gates, "AGAIN_S", 0.05)
    return RunDir(tmp_path / "run")


@pytest.fixture
def server(run: RunDir) -> Iterator[ServerQueue]:
    with closing(ServerQueue.open(run.root, RUN)) as queue:
        yield queue


def a_gate(
    run: RunDir, cluster: FakeCluster, *, deterministic: bool = False, here: int = 1, **launch: Any
) -> tuple[_Gate, Any]:
    plan = RunPlan(
        config=run.root.parent / "project" / "setup.py",
        launch=LaunchSettings(ray="auto", **{"node_wait": 0.2, **launch}),
        training=TrainingSettings(deterministic=deterministic),
        worker_devices=(CPU,) * here,
    )
    run.root.mkdir(exist_ok=True)
    state = RunState(run_id=RUN, state=RUNNING, started="", plan=plan)
    run.write_state(state)
    stop = SimpleNamespace(requested=False)
    return _Gate(run, state, cluster, stop), stop  # type: ignore[arg-type]


@contextmanager
def running(gate: _Gate, stop: Any) -> Iterator[None]:
    thread = threading.Thread(target=gate.run)
    thread.start()
    try:
        yield
    finally:
        stop.requested = True
        thread.join(30)
    assert not thread.is_alive()


def test_nodes_join_are_lost_and_join_again(run: RunDir, server: ServerQueue) -> None:
    cluster = FakeCluster("gpu2", "gpu3")
    dying = FakeActor()
    actors = {"gpu2": [dying, FakeActor()], "gpu3": [FakeActor()]}
    cluster.make = lambda name: actors[name].pop(0)
    gate, _ = a_gate(run, cluster, nodes=3)
    thread = threading.Thread(target=gate.run)
    thread.start()
    until(lambda: sorted(cluster.started) == ["gpu2", "gpu3"], "both nodes")
    until(lambda: {worker.name for worker in server.workers()} == {"dev2", "dev3"}, "numbers behind the local worker")
    dying.death = RuntimeError("The actor died unexpectedly.\nmore")
    until(lambda: cluster.started.count("gpu2") == 2, "the lost one again")
    assert dying.killed
    server.submit(make_job(1))
    until(server.finished, "a group")
    run.update_state(state=FINISHED)
    thread.join(30)
    assert not thread.is_alive()
    record = read_nodes(run.nodes)
    assert record is not None and record.losses == 1 and {node.name for node in record.nodes} == {"gpu2", "gpu3"}
    assert not server.workers()


def test_a_machine_whose_gpus_others_use_is_not_counted(run: RunDir) -> None:
    cluster = FakeCluster("gpu2", "gpu3", gpus=8)
    cluster.free_gpus["gpu3"] = 2
    gate, _ = a_gate(run, cluster, nodes=3)
    with pytest.raises(UsageError) as refusal:
        gate.run()
    said = str(refusal.value)
    assert "3 nodes were asked for, 2 are there after 0.2 s (--node-wait): gpu2: 8 of 8 CPUs, 8 of 8 GPUs free" in said
    assert "gpu3: 8 of 8 CPUs, 2 of 8 GPUs free, too little for 8 workers (6 CPUs and 8 GPUs)" in said


def test_ranks_of_the_trainer_get_their_places_before_workers(
    run: RunDir, server: ServerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, asked, placed = FakeCluster("gpu2"), [], threading.Event()
    monkeypatch.setattr(cluster, "leaves_ranks_their_gpus", lambda _: asked.append(1) or placed.is_set(), raising=False)
    gate, stop = a_gate(run, cluster, nodes=2, trainer_nodes=2, main_process="gpu0:29500")
    with running(gate, stop):
        until(lambda: len(asked) > 2)
        assert cluster.started == []
        placed.set()
        until(lambda: cluster.started == ["gpu2"])


def test_a_lost_machine_that_others_use_meanwhile_is_waited_for_and_said(
    run: RunDir, server: ServerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "START_S", 0.0)
    cluster, dying = FakeCluster("gpu2", gpus=1), FakeActor()
    actors = [dying, FakeActor()]
    cluster.make = lambda name: actors.pop(0)

    def said() -> bool:
        record = read_nodes(run.nodes)
        return bool(record and record.nodes) and record.nodes[0].gone.startswith(
            "its CPUs or GPUs are used by others: gpu2: 8 of 8 CPUs, 0 of 1 GPU free, too little for 1 worker"
        )

    with running(*a_gate(run, cluster, nodes=2)):
        until(server.workers, "the node")
        cluster.free_gpus["gpu2"] = 0
        dying.death = RuntimeError("The actor died unexpectedly.")
        until(said, "what it waits for")
        assert cluster.started == ["gpu2"]
        cluster.free_gpus["gpu2"] = 1
        until(lambda: len(cluster.started) == 2, "the machine again")


@pytest.mark.parametrize(
    ("facts", "deterministic", "words"),
    [
        ({"versions": {**VERSIONS, "torch": "2.12.1"}}, False, r"gpu2 has torch 2\.12\.1, and the server 2\.13\.0"),
        ({"versions": {**VERSIONS, "vllm": "0.32.0"}}, False, r"has vllm 0\.32\.0, and the server \(not installed\)"),
        ({"cpu": "arm"}, True, "other processors than the server"),
        ({"gpus": ["H100"]}, True, "other GPUs than the server"),
        ({"cpu": "arm", "gpus": ["H100"]}, False, ""),
    ],
)
def test_a_node_that_is_not_alike_is_refused(
    facts: dict[str, Any], deterministic: bool, words: str, run: RunDir
) -> None:
    gate, _ = a_gate(run, FakeCluster("gpu2"), deterministic=deterministic)
    (machine,) = FakeCluster("gpu2").machines()
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        gate._compare(machine, {**FACTS, **facts})


def test_a_node_that_cannot_begin_ends_the_start(run: RunDir, server: ServerQueue) -> None:
    cluster = FakeCluster("gpu2")
    cluster.make = lambda name: FakeActor("the disk is full")
    gate, _ = a_gate(run, cluster, nodes=2)
    with pytest.raises(NodeRefused, match="gpu2: the disk is full"):
        gate.run()


def test_a_gate_that_has_nobody_left_ends(run: RunDir, server: ServerQueue, warnings: list[str]) -> None:
    cluster = FakeCluster("gpu2")
    gate, _ = a_gate(run, cluster, nodes=2, here=0, node_wait=2.0)
    dying = FakeActor()

    def make(name: str) -> FakeActor:
        cluster.names.clear()
        return dying

    cluster.make = make
    dying.death = RuntimeError("gone")
    with pytest.raises(PeerDiedError, match="No other machine is left"):
        gate.run()
    said = "gpu2 is lost to Ray as well. Start it there again: ray start --address=gpu1:6379"
    assert warnings == ["gpu2 is gone: gone: its groups are pending again", said]


def test_the_loss_of_the_head_is_said(
    run: RunDir, server: ServerQueue, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "HEAD_EVERY_S", 0.0)
    cluster = FakeCluster("gpu2")
    with running(*a_gate(run, cluster, nodes=2)):
        cluster.head = "nowhere:6379"
        until(lambda: warnings, "a warning")
    assert warnings[0].startswith("Ray is gone: 1 local worker continues. The other nodes end in about a minute")
    assert len(warnings) == 1


def test_a_gate_that_begins_again_does_not_wait_for_a_head_that_is_gone(run: RunDir) -> None:
    a_gate(run, FakeCluster("gpu2"))
    write_nodes(run.nodes, NodesRecord(head="nowhere:6379"))
    with pytest.raises(PeerDiedError, match="Ray is gone: its head, nowhere:6379, takes no connection"):
        gates.run_gate(run.root)


def test_a_gate_that_begins_again_takes_what_is_there(run: RunDir, server: ServerQueue) -> None:
    """A run may shrink: what was asked for is wanted at the first start only."""
    run.root.mkdir(exist_ok=True)
    write_nodes(run.nodes, NodesRecord(nodes=(NodeRecord(name="gpu3", number=2, worker="dev2", workers=2),)))
    gate, stop = a_gate(run, FakeCluster("gpu2"), nodes=3)
    assert gate._rows[2].gone == "the process that serves it has begun again"
    with running(gate, stop):
        until(server.workers, "the one that is there")


def test_a_stop_ends_it_and_a_number_that_is_taken_is_waited_for(run: RunDir, server: ServerQueue) -> None:
    cluster = FakeCluster("gpu2")
    by_hand = WorkerQueue.open(run.root, 1, "cpu")
    with running(*a_gate(run, cluster, nodes=2, here=0, node_wait=60.0)):
        until(lambda: len(cluster.started) > 0, "a start")
        by_hand.close()
        until(lambda: any(worker.workers == 2 for worker in server.workers()), "the number")
    assert not server.workers()


def test_a_machine_whose_raylet_takes_no_connection_is_not_taken(
    run: RunDir, server: ServerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has gone down and come up again, and Ray has not seen yet that the one before is gone."""
    cluster = FakeCluster("gpu2", "gpu2 again")
    down = [machine._replace(address="10.0.0.1:1") for machine in cluster.machines()[:1]]
    machines = [*down, *cluster.machines()[1:]]
    monkeypatch.setattr(cluster, "machines", lambda: machines)
    with running(*a_gate(run, cluster, nodes=2)):
        until(lambda: server.workers(), "the node")
        assert cluster.started == ["gpu2 again"]


def test_machines_that_nobody_serves_any_more_are_gone(run: RunDir) -> None:
    run.root.mkdir(exist_ok=True)
    rows = (NodeRecord(name="gpu2", number=2), NodeRecord(name="gpu3", number=3, gone="is silent", gone_s=1.0))
    write_nodes(run.nodes, NodesRecord(head="gpu1:6379", nodes=rows))
    all_gone(run.nodes, "is given up. Ray is gone")
    record = read_nodes(run.nodes)
    assert record is not None and record.alive == 0
    assert [row.gone for row in record.nodes] == ["is given up. Ray is gone", "is silent"]
