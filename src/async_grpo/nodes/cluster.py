"""Ray: which machines there are, and an actor on one of them. The only module that imports it."""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from async_grpo.errors import AsyncGRPOError, PeerDiedError, UsageError
from async_grpo.formatting import counted, size
from async_grpo.nodes.node import FarNode
from async_grpo.rundir.folders import is_ours

if TYPE_CHECKING:
    from async_grpo.deltas.coding import Bytes

LOCAL = "local"
SHORT = "/tmp"  # the name of a Unix socket has at most 107 characters, of which Ray takes 75
# The servers of a node with this address listen on it alone, those of any other, 127.0.0.2 too, on all interfaces.
LOCAL_ADDRESS = "127.0.0.1"
# Else Ray puts an address that others can reach in its place. It asks for no more on Linux.
STAYS_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
LOCAL_STORE_BYTES = 256 * 2**20
CONNECTED_S = 2.0  # for a head or a raylet to take a connection
RANKS_START_S = 300.0  # for an actor that has a place to answer: it imports torch
CPUS_A_WORKER = 0.75  # a node whose CPUs are all counted has capacity for the actor
EXCHANGE, WEIGHTS = "exchange", "weights"  # groups of threads of an actor
AUTH_MODE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


class StoreFullError(AsyncGRPOError):
    """The cluster's store has no memory for a bucket."""

    exit_code = 1


class Machine(NamedTuple):
    """A node of the cluster."""

    node_id: str
    name: str
    address: str  # HOST:PORT of its raylet
    cpus: float
    gpus: int
    free_cpus: float
    free_gpus: int

    @property
    def free(self) -> str:
        """`6 of 8 CPUs, 2 of 8 GPUs free`."""
        gpus = f", {self.free_gpus} of {counted(self.gpus, 'GPU')}" if self.gpus else ""
        return f"{self.free_cpus:g} of {counted(int(self.cpus), 'CPU')}{gpus} free"


class RayNode:
    """An actor on a machine, as the gate calls it. Each call returns at once."""

    def __init__(self, handle: Any, ray: Any) -> None:
        self._handle, self._ray = handle, ray

    def facts(self) -> Future[dict[str, Any]]:
        return self._future(self._handle.facts.remote())

    def begin(self, order: dict[str, Any]) -> Future[str]:
        return self._future(self._handle.begin.remote(order))

    def exchange(self, jobs: Sequence[tuple[int, int, bytes]], states: bytes) -> Future[dict[str, Any]]:
        method = self._handle.exchange.options(concurrency_group=EXCHANGE)
        return self._future(method.remote([tuple(job) for job in jobs], states))

    def receive(self, about: dict[str, Any], data: Any) -> Future[dict[str, Any]]:
        return self._future(self._handle.receive.options(concurrency_group=WEIGHTS).remote(about, [data]))

    def end(self, finished: bool) -> Future[None]:
        return self._future(self._handle.end.remote(finished))

    def kill(self) -> None:
        """End the actor at once, wherever it is: one that is frozen ends when it thaws."""
        with suppress(Exception):  # Ray may be gone
            self._ray.kill(self._handle)

    def _future(self, reference: Any) -> Future[Any]:
        return reference.future()


class FarNodeOnRay(FarNode):
    """The actor. It fetches what is in the store itself: a call whose arguments Ray fetches may wait for minutes."""

    def receive(self, about: dict[str, Any], data: list[Any]) -> dict[str, Any]:
        arrived = fetched(data[0], about["patience_s"])
        if arrived is None:
            return {"published": None, "why": "", "busy": False, "late": True}
        return {**self.take_weights(about, arrived), "late": False}


def fetched(reference: Any, seconds: float) -> Bytes | None:
    """Return what `Cluster.put` has put, on another machine; None: it has not arrived in this time.

    Ray fetches from any machine that has a copy. Where that one is lost it tries again after 10, 20, 40 … s (its
    `pull_manager.cc`), also from the same.
    """
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        found: Bytes = ray.get(reference, timeout=seconds)
    except GetTimeoutError:
        return None
    return found


class Cluster:
    """A connection to a cluster, in a `with` block. With `local` it is made here, and ended with the block.

    Raises:
        UsageError: there is no such cluster, or this process may not use it.
    """

    def __init__(self, address: str, *, nodes: int, cpus: float, run_id: str, shows_output: bool = False) -> None:
        self._local: Any = None
        self._gpus_of_ranks: dict[str, int] = {}  # of the trainer, by node
        self._folder = _folder_for(run_id) if address == LOCAL else None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        if self._folder is not None:
            _prepare_local(self._folder)
        else:  # tries to reach the head, of 40 s each where nothing answers: by default it is 20 of them
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        import ray
        from ray.exceptions import AuthenticationError

        self._ray = ray
        try:
            if address == LOCAL:
                address = self._start_local(nodes, cpus)
            ray.init(address=address, log_to_driver=shows_output, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError, AuthenticationError) as error:
            self.close()
            raise UsageError(f"--ray {address}: Ray cannot be reached: {error}") from error
        except Exception as error:  # of no class of its own: a raylet that was too slow to start on a busy machine
            self.close()
            raise PeerDiedError(f"--ray {address}: Ray has not started: {error}") from error

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def machines(self) -> list[Machine]:
        """The living machines but this one, by name."""
        here = self._ray.get_runtime_context().get_node_id()
        from ray._private.state import available_resources_per_node  # Ray has no other way to see what is free

        others = [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] != here]
        free, ranks = available_resources_per_node(), self._gpus_of_ranks
        found = [_machine(node, free, ranks.get(node["NodeID"], 0)) for node in others]
        return sorted((it for it in found if it.gpus or not ranks.get(it.node_id)), key=lambda machine: machine.name)

    def start_ranks(self, actor: type, count: int, needs: Mapping[str, float], name: str, wait_s: float) -> list[Any]:
        """An actor on each of `count` other machines, which end with this process. `UsageError`: too few have room.

        Each has answered `ready()`. `name` is that of their placement group.
        """
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = {"ray.io/node-id": f"!{self._ray.get_runtime_context().get_node_id()}"}
        places = [dict(needs)] * count
        group = placement_group(places, "STRICT_SPREAD", name=name, bundle_label_selector=[others] * count)
        if not group.wait(wait_s):
            there = ", ".join(f"{machine.name}: {machine.free}" for machine in self.machines()) or "this one alone"
            raise UsageError(
                f"--trainer-nodes {count + 1}: after {wait_s:g} s (--node-wait) no {count} other nodes have room for "
                f"{' and '.join(f'{amount:g} {name}' for name, amount in needs.items())} each: {there}. Start Ray on "
                "others (`ray start --address=…`), free what is used there, or ask for fewer."
            )
        remote = self._ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))(actor)
        ways = (PlacementGroupSchedulingStrategy(group, number) for number in range(count))
        actors = [remote.options(scheduling_strategy=way).remote() for way in ways]
        try:  # a cold file system takes long to import torch
            self._ray.get([actor.ready.remote() for actor in actors], timeout=RANKS_START_S)
        except self._ray.exceptions.RayError as error:
            raise UsageError(f"--trainer-nodes {count + 1}: the ranks' actors have not started: {error}") from error
        return actors

    def leaves_ranks_their_gpus(self, name: str) -> bool:
        """Whether `start_ranks` of another process has its places by this name: `machines` leaves out their GPUs."""
        from ray.util import placement_group_table

        for group in placement_group_table().values():
            if (group["name"], group["state"]) == (name, "CREATED"):
                places = group["bundles_to_node_id"].items()
                self._gpus_of_ranks = {node: int(group["bundles"][number].get("GPU", 0)) for number, node in places}
        return bool(self._gpus_of_ranks)

    @property
    def here(self) -> str:
        """The address of this machine that the others reach."""
        return str(self._ray.util.get_node_ip_address())

    def start(self, machine: Machine, *, workers: int, gpus: int) -> RayNode:
        """An actor with capacity for these workers, on this machine and no other. It may have to wait for it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._ray.remote(concurrency_groups={EXCHANGE: 2, WEIGHTS: 1})(FarNodeOnRay)
        affinity = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
        options = {"num_cpus": CPUS_A_WORKER * workers, "num_gpus": gpus, "max_restarts": 0}
        return RayNode(actor.options(scheduling_strategy=affinity, **options).remote(), self._ray)

    def open_to_the_network(self) -> str:
        """Why others than this user may run code in the cluster; empty where they cannot."""
        if os.environ.get(AUTH_MODE) == "token":
            return ""
        addresses = {node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        reachable = sorted(address for address in addresses if not ip_address(address).is_loopback)
        if not reachable:
            return ""
        return f"who can reach {reachable[0]} can run code as you: the cluster asks for no token"

    @property
    def head(self) -> str:
        """Where the head of the cluster takes connections, HOST:PORT."""
        return str(self._ray.get_runtime_context().gcs_address)

    def put(self, data: Any) -> Any:
        """Bytes in the cluster's store, for any number of calls. `StoreFullError`: there is no memory for them."""
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError

        try:
            return self._ray.put(data)
        except (ObjectStoreFullError, OutOfDiskError) as error:
            raise StoreFullError(
                f"Ray's object store on this machine is full, and so is the disk that it would use: {size(len(data))} "
                "have no room. Make room (`ray memory`, `df`), or start Ray with a larger --object-store-memory."
            ) from error

    def close(self) -> None:
        self._ray.shutdown()
        if self._local is not None:
            self._local.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start_local(self, nodes: int, cpus: float) -> str:
        from ray.cluster_utils import Cluster as LocalCluster

        common: dict[str, Any] = {"include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
        common |= {"node_ip_address": LOCAL_ADDRESS, "num_gpus": 0}
        head = {**common, "num_cpus": 1, "node_name": "node1"}
        self._local = LocalCluster(initialize_head=True, head_node_args=head)
        for number in range(2, nodes + 1):
            self._local.add_node(**common, num_cpus=math.ceil(cpus), node_name=f"node{number}")
        return str(self._local.address)


def _folder_for(run_id: str) -> Path:
    """A new folder for Ray's files, whose name nobody knows before. What a killed gate has left of this run goes."""
    for left in Path(SHORT).glob(f"agrpo-{run_id}-*"):
        if is_ours(left):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"agrpo-{run_id}-", dir=SHORT))


def _prepare_local(folder: Path) -> None:
    """Before Ray is imported: its files in this folder, and a token that nobody else has."""
    os.environ.update({"RAY_TMPDIR": str(folder), AUTH_MODE: "token", AUTH_TOKEN: secrets.token_hex(32), **STAYS_LOCAL})
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_worker_niceness", "0")  # as local workers; by default they get what is left over


def answers(address: str) -> bool:
    """Whether a head or a raylet, HOST:PORT, takes connections. Ray itself notices its loss after a minute or two."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECTED_S).close()
    except OSError:
        return False
    return True


def _machine(node: dict[str, Any], free: Mapping[str, Mapping[str, float]], gpus_of_ranks: int) -> Machine:
    address, name, has = node["NodeManagerAddress"], node["NodeName"], node["Resources"]
    named = name if name and name != address else node["NodeManagerHostname"]
    left = free.get(node["NodeID"], {})
    return Machine(
        node["NodeID"],
        named,
        address=f"{address}:{node['NodeManagerPort']}",
        cpus=float(has.get("CPU", 0)),
        gpus=int(has.get("GPU", 0)) - gpus_of_ranks,
        free_cpus=float(left.get("CPU", 0)),
        free_gpus=int(left.get("GPU", 0)),
    )
