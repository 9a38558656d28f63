"""Runs with nodes on a real Ray cluster of this machine, nodes that are killed, frozen and refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed here: `make test-nodes` makes an environment that has it")

from machines import STARTS, claims_of, groups_of

from async_grpo.archive.audit import SET_ASIDE, audit
from async_grpo.nodes.seat import SILENCE_S
from async_grpo.queue import quarantined
from async_grpo.roles.replay import checkpoint_digest
from kit.runs import ROOT, SETUP, Command, command, finish, lines_of, ran, read, steps_logged
from kit.several_ranks import EXAMPLES, same_training, same_weights
from kit.verl_files import write_model_and_tasks
from kit.waiting import until, until_gone

pytestmark = pytest.mark.integration

STEPS = 24
LOCAL = ("--ray", "local", "--workers-per-node", "1", "--eval-every", "0", "--nodes")
TOKEN = "0123456789abcdef" * 4
RECIPE = ROOT / "src" / "app" / "trainer_setup_tiny.py"


@pytest.fixture(autouse=True)
def on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def having(run: Command | None, *words: str) -> list[psutil.Process]:
    """The processes of the run, or of this test, with these words in their command."""
    found = []
    for child in psutil.Process().children(recursive=True) if run is None else run.children():
        with suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if all(word in line for word in words):
                found.append(child)
    return found


def listening(run: Command) -> dict[str, set[str]]:
    """Where processes of the run can be reached, TCP and UDP: the addresses of each that can, by name."""
    found: dict[str, set[str]] = {}
    for process in (psutil.Process(run.process.pid), *run.children()):
        with suppress(psutil.NoSuchProcess):
            ends = [end.laddr.ip.removeprefix("::ffff:") for end in process.net_connections() if not end.raddr]
            name = process.name().partition(".")[0]  # an actor's has the method that it is in
            found.setdefault(name, set()).update(ends)
    return {name: addresses for name, addresses in found.items() if addresses}


def no_longer_claimed(run_dir: Path, claims: set[str]) -> float:
    """Seconds until none of these claims is there."""
    began = time.monotonic()
    while any((run_dir / "queue" / name).exists() for name in claims):
        assert time.monotonic() - began < 60, "the claims of a lost node stay"
        time.sleep(0.01)
    return time.monotonic() - began


def processes_of_ray(run_id: str) -> list[psutil.Process]:
    """Find the processes of this run's cluster, by its folder in their commands. Another test may have its own."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if any(f"agrpo-{run_id}-" in word for word in process.cmdline()):
                found.append(process)
    return found


def test_nodes_that_are_killed_and_frozen_cost_nothing(tmp_path: Path) -> None:
    """A far worker, an actor, the gate and a whole node are killed in one run, and an actor is frozen and thawed.

    Meanwhile none of its processes can be reached from another machine.
    """
    run_dir, node_dir = tmp_path / "worker", tmp_path / "nodes"
    node_dir.mkdir()
    options = ("-n", "0", *LOCAL, "3", "--node-dir", str(node_dir), "--steps", "100000")
    with command("train", str(SETUP), *options, cwd=tmp_path, TEST_REWARD_S="0.05") as run:
        run.wait_until(lambda: groups_of(run_dir) > 8, "groups of nodes")
        seen, doors = run.children(), listening(run)
        assert {"gcs_server", "raylet", "ray::FarNodeOnRay"} <= doors.keys()
        assert set().union(*doors.values()) == {"127.0.0.1"}, doors

        def made_more() -> None:
            had = groups_of(run_dir)
            run.wait_until(lambda: groups_of(run_dir) > had + 8, "groups after a loss")

        worker = run.wait_until(lambda: having(run, "async_grpo.cli worker", str(node_dir)), "a far worker")[0]
        assert worker.nice() == psutil.Process(run.process.pid).nice(), "it would get what local workers leave over"
        worker.kill()
        made_more()
        frozen = having(run, "ray::FarNode")[0]
        names = [name for name in ("dev1", "dev2") if claims_of(run_dir, name)]
        claims = {name: run.wait_until(lambda name=name: claims_of(run_dir, name), "claims") for name in names}
        frozen.suspend()
        for name in names:  # one of them is silent, the other goes on
            assert no_longer_claimed(run_dir, claims[name]) < SILENCE_S + 20
        run.wait_until(lambda: "has not answered for 10 s" in run.output, "the silence")
        frozen.resume()
        until_gone([frozen])
        made_more()
        run.wait_until(lambda: len(having(run, "ray::FarNode")) == 2, "both nodes")
        having(run, "ray::FarNode")[0].kill()
        made_more()
        gate = having(run, "async_grpo.cli nodes")[0]
        held = claims_of(run_dir, "dev1") | claims_of(run_dir, "dev2")
        gate.kill()
        no_longer_claimed(run_dir, held)
        made_more()
        actor = run.wait_until(lambda: having(run, "ray::FarNode"), "an actor")[0]
        raylet = actor.parent()
        assert raylet is not None and raylet.name() == "raylet"
        raylet.kill()
        made_more()
        seen += run.children()
        assert set().union(*listening(run).values()) == {"127.0.0.1"}
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    report = audit(run_dir)
    assert report.anomalies == [] and report.duplicates == 0, report
    assert report.attempts().keys() <= {1, 2}, "only the death of the far worker counts"
    assert not (run_dir / "quarantine").exists() or not list((run_dir / "quarantine").iterdir())
    until_gone(seen)
    until(lambda: not processes_of_ray(report.run_id), "the end of Ray's agents, whose raylet was killed")
    until(lambda: not list(node_dir.iterdir()), "the run directory of the killed node to be deleted")
    assert not list(Path("/tmp").glob(f"agrpo-{report.run_id}*"))
    summary = read(run_dir / "summary.json")
    assert summary["node_restarts"] >= 1 and summary["node_bytes"] > 0


def test_the_weights_are_those_of_a_run_without_nodes(tmp_path: Path) -> None:
    """Bit by bit: three nodes, of which one loses its actor, and then two that resume what they left."""
    here, nodes = tmp_path / "here", tmp_path / "nodes"
    common = ("--steps", str(STEPS), "--deterministic", "--eval-every", "0")
    for folder in (here, nodes):
        folder.mkdir()
    finish(here, "-n", "1", *common)
    options = ("train", str(SETUP), "-n", "0", *LOCAL)
    with command(*options, "3", *common, cwd=nodes, TEST_REWARD_S="0.05") as run:
        run.wait_until(lambda: len(steps_logged(nodes / "worker")) > 4, "a few steps")
        having(run, "ray::FarNode")[0].kill()
        run.wait_until(lambda: len(steps_logged(nodes / "worker")) > 9, "steps without it")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.output
    assert not (nodes / "checkpoints" / f"checkpoint-{STEPS}").exists(), "there is nothing left to resume"
    ran(*options, "2", *common, "--resume", cwd=nodes)
    digests = [checkpoint_digest(folder / "checkpoints" / f"checkpoint-{STEPS}") for folder in (here, nodes)]
    assert digests[0] == digests[1]
    assert read(nodes / "worker" / "summary.json")["nodes"] == ["node2"]


def test_a_setup_that_a_node_refuses_ends_the_run(tmp_path: Path) -> None:
    refusing = Path(__file__).parent / "setups" / "refusing.py"
    with command("train", str(refusing), "-n", "0", *LOCAL, "2", cwd=tmp_path) as run:
        assert run.wait() == 2
    assert "on node node2: error: there is no model of this name here" in run.output


def test_a_group_that_kills_its_far_worker_is_given_up_after_three_attempts_in_all(tmp_path: Path) -> None:
    """And takes no other along."""
    options = ("-n", "0", *LOCAL, "2", "--steps", "12", "--groups-per-claim", "1")
    finish(tmp_path, *options, setup=SETUP, TEST_REWARD="deadly", TEST_REWARD_S="0.01")
    given_up = quarantined(tmp_path / "worker")
    assert given_up, "the poison was not drawn"
    assert {(aside.kind, aside.attempt) for aside in given_up} == {("failed", 2)}
    assert all("on node node2: Worker dev1 died while it had this job" in aside.reason for aside in given_up)
    report = audit(tmp_path / "worker")
    assert report.anomalies == [] and report.count(SET_ASIDE) == len(given_up)
    assert report.attempts()[1] > 30, report.attempts()


@contextmanager
def a_cluster(nodes: int, gpus: int = 0) -> Iterator[str]:
    """A cluster of this machine that nobody else uses, in a process of its own; its address."""
    folder = tempfile.mkdtemp(prefix="agrpo-t", dir="/tmp")
    env = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    program = [sys.executable, str(Path(__file__).parent / "cluster_of_nodes.py"), str(nodes), str(gpus)]
    pipe = subprocess.PIPE
    try:
        for _ in range(STARTS):  # a raylet ends itself where its agents take more than 15 s to start
            with subprocess.Popen(program, env=env, stdin=pipe, stdout=pipe, text=True) as process:
                assert process.stdout is not None
                try:
                    if address := process.stdout.readline().strip():
                        yield address
                        return
                finally:
                    process.communicate()
        raise AssertionError("Ray has not started")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ran_on_a_cluster(nodes: int, program: str, gpus: int = 0) -> subprocess.CompletedProcess[str]:
    """A program that gets the address of a cluster, and that was run to its end."""
    with a_cluster(nodes, gpus) as address:
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", program, address]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_a_token_that_is_missing_is_named_as_ray_names_it(tmp_path: Path) -> None:
    options = ("--ray", "127.0.0.2:6379", "-n", "0")
    with command("train", str(SETUP), *options, cwd=tmp_path, RAY_AUTH_MODE="token", HOME=str(tmp_path)) as run:
        assert run.wait() == 2
    assert "Ray cannot be reached: Token authentication is enabled but no authentication token was found" in run.output
    assert "ray get-auth-token --generate" in run.output


def test_a_cluster_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few machines, the doctor, a wrong token, and a run."""
    with a_cluster(2) as address:
        with command("doctor", "--ray", address, cwd=tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="f" * 64) as wrong:
            assert wrong.wait() == 1
        assert "Ray cannot be reached" in wrong.output
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
        with command("doctor", "--ray", address, cwd=tmp_path) as doctor:
            doctor.wait()
        assert "): 4 of 4 CPUs free; the same versions as here; a call takes" in " ".join(doctor.output.split())
        assert ": 64 MB to all others by gloo on lo: " in " ".join(doctor.output.split())
        options = ("--ray", address, "--node-wait", "2", "--eval-every", "0", "--steps", "4", "-n", "0")
        with command("train", str(SETUP), *options, "--nodes", "4", cwd=tmp_path) as short:
            assert short.wait() == 2
        assert "4 nodes were asked for, 2 are there after 2 s (--node-wait): node2: 4 of 4 CPUs free" in short.output
        finish(tmp_path, *options, "--workers-per-node", "1", "--run-dir", "run", setup=SETUP)
    assert audit(tmp_path / "run").anomalies == []
    assert str(ROOT) not in (tmp_path / "run" / "nodes.json").read_text()


@contextmanager
def a_trainer_on_nodes(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is said to `train`, for as many machines on a cluster of two nodes. The other node has a worker as well."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    text = (EXAMPLES / "ddp.yaml").read_text().replace("num_machines: 1", f"num_machines: {count}")
    config = folder / "several.yaml"
    config.write_text(text.replace("num_processes: 2", f"num_processes: {count}"))
    with a_cluster(2) as address:
        of_ray = ["--ray", address, "--workers-per-node", "1", "--trainer-nodes", str(count)]
        yield ["-n", "1", "--deterministic", "--eval-every", "0", "--accelerate-config", str(config), *of_ray]


def test_ranks_on_another_node_train_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, nodes = tmp_path / "here", tmp_path / "nodes"
    for folder in (here, nodes):
        folder.mkdir()
    finish(here, "-n", "1", "--deterministic", "--eval-every", "0", "--steps", "8")
    with a_trainer_on_nodes(nodes, 2, monkeypatch) as options:
        finish(nodes, *options, "--steps", "8")
    same_training(nodes, here, steps=8)
    same_weights(nodes, here, 8)


def test_more_nodes_than_the_cluster_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_trainer_on_nodes(tmp_path, 3, monkeypatch) as options:
        output = ran("train", str(SETUP), *options, "--node-wait", "2", cwd=tmp_path, code=2)
    said = "--trainer-nodes 3: after 2 s (--node-wait) no 2 other nodes have room for 0.75 CPU each: node2: 4 of 4 CPUs"
    assert said in " ".join(output.split()), output


@pytest.mark.slow
def test_ranks_on_another_node_are_stopped_and_resumed_and_end_with_their_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not need the gate, which is killed before."""
    run_dir = tmp_path / "worker"
    with a_trainer_on_nodes(tmp_path, 2, monkeypatch) as options:
        with command("train", str(SETUP), *options, "--steps", "100000", cwd=tmp_path) as run:
            run.wait_until(lambda: steps_logged(run_dir), "a step")
            run.process.send_signal(signal.SIGINT)
            assert run.wait() == 0 and "was killed" not in run.output, run.output
        assert read(run_dir / "run.json")["state"] == "stopped"
        assert read(tmp_path / "worker-machine1" / "run.json")["state"] == "finished", "its part of the run"
        stopped = max(steps_logged(run_dir))
        with command("train", "--resume", cwd=tmp_path) as run:
            run.wait_until(lambda: max(steps_logged(run_dir)) > stopped, "a step")
            having(run, "async_grpo.cli nodes")[0].kill()
            log = run_dir / "log_nodes.txt"
            run.wait_until(lambda: log.read_text().count("node2 joins as dev2") == 3, "the node's worker again")
            actor = having(None, "ray::RanksThere.run")[0]
            ranks = actor.children()
            assert ranks
            actor.kill()
            until_gone(ranks)
            assert run.wait() != 0, run.output
    assert "machine 1 (" in run.output and "has not answered for 25 s" in run.output


PLACES = """
import os
import sys

from async_grpo.nodes.cluster import Cluster


class Ranks:
    def ready(self): ...

    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]


def gpus(cluster):
    return [machine.gpus for machine in cluster.machines()]


with Cluster(sys.argv[1], nodes=1, cpus=1, run_id="places") as cluster:
    print(gpus(cluster), cluster.leaves_ranks_their_gpus("a:1"))
    ranks = cluster.start_ranks(Ranks, 2, {"CPU": 1, "GPU": 3}, "a:1", 60.0)
    print([len(cluster._ray.get(rank.gpus.remote()).split(",")) for rank in ranks])
    print(gpus(cluster), cluster.leaves_ranks_their_gpus("a:1"), gpus(cluster))
with Cluster(sys.argv[1], nodes=1, cpus=1, run_id="full") as cluster:
    cluster.start_ranks(Ranks, 1, {"CPU": 1, "GPU": 4}, "b:1", 60.0)
    cluster.leaves_ranks_their_gpus("b:1")
    print(gpus(cluster), cluster.here)
"""


def test_workers_get_the_gpus_that_the_ranks_of_a_node_leave() -> None:
    """A node without such is none to them. The server's node has no ranks of Ray, though it has as many GPUs."""
    ran = ran_on_a_cluster(3, PLACES, gpus=4)
    assert ran.stdout.splitlines() == [
        "[4, 4] False",
        "[3, 3]",
        "[4, 4] True [1, 1]",
        "[4] 127.0.0.2",
    ], ran.stdout + ran.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of mounts need root")
def test_a_setup_file_that_another_node_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    mine = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && cp "$1" "$0" && shift && exec "$@"')
    with (
        a_trainer_on_nodes(tmp_path, 2, monkeypatch) as options,
        command(
            "train", str(folder / SETUP.name), *options, cwd=tmp_path, within=(*mine, str(folder), str(SETUP))
        ) as run,
    ):
        assert run.wait() == 2, run.output
    assert "Machine 1 has not started its ranks: " in run.output and f"{folder / SETUP.name}" in run.output


FILLS = """
import sys

import numpy as np

from async_grpo.nodes.cluster import Cluster, StoreFullError

with Cluster(sys.argv[1], nodes=1, cpus=1, run_id="fills") as cluster:
    kept = cluster.put(np.zeros(50_000_000, np.uint8))
    try:
        cluster.put(np.zeros(120_000_000, np.uint8))
    except StoreFullError as error:
        print(error)
"""


def test_a_store_of_ray_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes the disk, too, before it says so; here the disk is full to it from the start."""
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0001")
    ran = ran_on_a_cluster(1, FILLS)
    assert ran.stdout.startswith("Ray's object store on this machine is full"), ran.stdout + ran.stderr
    assert "120.0 MB have no room. Make room" in ran.stdout


FETCHES = """
import os
import signal
import sys

import numpy as np
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_grpo.nodes.cluster import EXCHANGE, WEIGHTS, Cluster, FarNodeOnRay, RayNode


class Side:
    def receive(self, about, data):
        return {"published": 0, "why": "", "busy": False}


class Node(FarNodeOnRay):
    def __init__(self):
        super().__init__()
        self._side = Side()

    def raylet(self):
        return os.getppid()


def start(cluster, machine):
    actor = cluster._ray.remote(concurrency_groups={EXCHANGE: 2, WEIGHTS: 1})(Node)
    affinity = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
    return RayNode(actor.options(num_cpus=1, scheduling_strategy=affinity).remote(), cluster._ray)


def is_late(node, piece, patience_s):
    return node.receive({"patience_s": patience_s}, piece).result(120)["late"]


with Cluster(sys.argv[1], nodes=1, cpus=1, run_id="fetches") as cluster:
    first, second = (start(cluster, machine) for machine in cluster.machines())
    pieces = [cluster.put(np.zeros(300_000, np.uint8)) for _ in range(16)]
    assert not any(is_late(first, piece, 60.0) for piece in pieces)
    raylet = cluster._ray.get(first._handle.raylet.remote())
    os.kill(raylet, signal.SIGSTOP)
    try:
        late = sum(is_late(second, piece, 0.5) for piece in pieces)
        print(late, is_late(second, cluster.put(np.zeros(300_000, np.uint8)), 60.0))
    finally:
        os.kill(raylet, signal.SIGCONT)
"""


def test_weights_that_a_frozen_machine_has_too_are_waited_for_as_long_as_was_asked() -> None:
    """Ray fetches from any machine with a copy. Half of them are that one; what is put again arrives."""
    ran = ran_on_a_cluster(3, FETCHES)
    late, is_late_again = ran.stdout.split()
    assert int(late) > 0 and is_late_again == "False", ran.stdout + ran.stderr


@pytest.mark.slow
def test_keys_of_verl_train_on_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy and a critic, gradients by PCGrad, sharded over both nodes."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    files, actor = write_model_and_tasks(tmp_path), "actor_rollout_ref.actor"
    keys = [f"data.train_files={files}", f"actor_rollout_ref.model.path={tmp_path / 'model'}", "trainer.nnodes=2"]
    keys += ["data.train_batch_size=16", f"{actor}.ppo_mini_batch_size=16", "data.max_response_length=3"]
    keys += ["trainer.device=cpu", "trainer.total_training_steps=4", f"trainer.default_local_dir={tmp_path / 'out'}"]
    with a_cluster(2) as address:
        options = ("mtl.method=pcgrad", "--ray", address, "-n", "1", "--workers-per-node", "1")
        output = ran(*keys, *options, cwd=tmp_path, script=ROOT / "scripts" / "main_ppo.py")
    assert "nodes: Ray has 2, the trainer is on 2 (trainer.trainer_nodes)" in output
    assert len(read(tmp_path / "out/run/ranks.json")) == 1 and steps_logged(tmp_path / "out/run") == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_demo_with_nodes_learns_and_is_evaluated_though_one_is_killed(tmp_path: Path) -> None:
    """Evaluations are claimed by nodes as well, each at one version."""
    run_dir = tmp_path / "worker"
    options = ("-n", "1", "--ray", "local", "--nodes", "3", "--workers-per-node", "1", "--eval-every", "25")
    with command("train", str(RECIPE), *options, cwd=tmp_path) as run:
        run.wait_until(lambda: len(having(run, "ray::FarNode")) == 2 and groups_of(run_dir) > 400, "groups of nodes")
        raylet = having(run, "ray::FarNode")[0].parent()
        assert raylet is not None and raylet.name() == "raylet"
        raylet.kill()
        assert run.wait() == 0, run.output
    report = audit(run_dir)
    assert report.anomalies == [] and report.duplicates == 0, report
    lines = lines_of(run_dir / "evaluations.jsonl")
    assert all(line["failed"] == {} for line in lines)
    assert lines[-1]["figures"]["pass@1"]["value"] >= 0.9, lines[-1]["figures"]
