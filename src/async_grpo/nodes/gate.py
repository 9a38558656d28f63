"""The process on the server's machine that claims for other machines, and the only one that is connected to Ray.

It has a thread for each node that the run asked for. A thread takes a machine, starts an actor there, and serves it
until it is lost; then it takes a machine again, the same or another. The launcher starts the gate again when it dies.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_grpo.errors import AsyncGRPOError, PeerDiedError, QueueError, UsageError, reason_of
from async_grpo.formatting import counted, for_people
from async_grpo.log import logger
from async_grpo.nodes.cluster import CPUS_A_WORKER, LOCAL, Cluster, Machine, RayNode, answers
from async_grpo.nodes.node import facts
from async_grpo.nodes.seat import FarNodeSeat, NodeGaveUp, NodeRefused, words_of
from async_grpo.nodes.sending import PublishedVersions
from async_grpo.nodes.tree import packed
from async_grpo.queue import WorkerQueue
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.rundir.shape import as_json
from async_grpo.setup.process import StopRequest
from async_grpo.telemetry.activity import LOADING, Activity
from async_grpo.telemetry.nodes_file import NodeRecord, NodesRecord, read_nodes, write_nodes

LOOK_S = 0.2
RECORD_EVERY_S = 1.0
DEFAULT_WORKERS = 2  # of a node without GPUs
START_S = 120.0  # for an actor that has capacity to answer, on a machine that may be busy
BEGIN_S = 300.0  # for it to import what a worker does and to start them, on a machine that may be busy
END_S = 10.0  # for the nodes to end
AGAIN_S = 2.0  # between tries to find a machine; doubled
MOST_DOUBLINGS = 4  # times where starts fail in a row
LOST = "is lost to Ray as well"
TAKEN = "its CPUs or GPUs are used by others"
HEAD_EVERY_S = 5.0  # between looks for the head of Ray


def run_gate(root: Path) -> None:
    """Serve the nodes of the run in `root` until it ends.

    Raises:
        UsageError: the machines that were asked for are not there, or are not alike.
        NodeRefused: a node's worker has refused the setup.
    """
    stop = StopRequest().install()
    sys.stdout = sys.__stdout__  # what Ray prints goes to the log file as it is
    run = RunDir(root)
    state = run.state_of(None)
    launch = state.plan.launch
    assert launch.ray is not None, "the launcher starts it only then"
    workers = launch.workers_per_node or DEFAULT_WORKERS
    before = read_nodes(run.nodes)  # of a gate that died
    if before is not None and launch.ray != LOCAL and not answers(before.head):
        raise PeerDiedError(f"Ray is gone: its head, {before.head}, takes no connection.")
    with Cluster(launch.ray, nodes=launch.nodes or 1, cpus=workers * CPUS_A_WORKER, run_id=state.run_id) as cluster:
        stop.install().defer()  # Ray has put a handler of its own in the place of ours
        _Gate(run, state, cluster, stop).run()


class _Gate:
    """The threads of a run's nodes, and what they share."""

    def __init__(self, run: RunDir, state: RunState, cluster: Cluster, stop: StopRequest) -> None:
        self._run, self._state, self._cluster, self._stop = run, state, cluster, stop
        self._launch = state.plan.launch
        self._launched_by = os.getppid()
        self._tree = packed(state.plan.config)
        self._facts = facts()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._versions = PublishedVersions(run.weights_handle, cluster.put)
        self._mutex = threading.Lock()
        self._taken: dict[str, int] = {}  # machine -> number of the worker that it is
        self._trouble: BaseException | None = None
        self._head_is_lost = False
        self._failed_starts: dict[int, int] = {}  # in a row, by number
        self._unusable: set[str] = set()  # machines whose workers have failed time and again, or were refused later
        before = read_nodes(run.nodes)  # a gate that died has left its counts
        self._rows = {row.number: row for row in before.nodes} if before is not None else {}
        for row in self._rows.values():
            if not row.gone:
                row.gone, row.gone_s = "the process that serves it has begun again", time.monotonic()
        self._has_joined = set(self._rows)  # numbers

    def run(self) -> None:
        if why := self._cluster.open_to_the_network():
            logger.warning("{}. SECURITY.md says how to ask for one", why)
        while self._launch.trainer_nodes > 1 and not self._ranks_have_places() and not self._is_over():
            time.sleep(LOOK_S)
        machines = self._cluster.machines() if self._has_joined else self._wait_for_machines()
        count = self._launch.nodes - 1 if self._launch.nodes else max(len(machines), len(self._has_joined))
        first = self._state.plan.num_workers + 1
        threads = [
            threading.Thread(target=self._guarded, args=(number,), name=f"node-{number}", daemon=True)
            for number in range(first, first + count)
        ]
        for thread in threads:
            thread.start()
        try:
            self._watch()
        finally:
            self._goes_on.clear()
            deadline = time.monotonic() + END_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            self._record()
        if self._trouble is not None:
            raise self._trouble

    def _ranks_have_places(self) -> bool:
        """Look for those of this start, which the address that its machine 0 has chosen names."""
        state = self._run.read_state()
        address = state.plan.launch.main_process if state is not None else None
        return address is not None and self._cluster.leaves_ranks_their_gpus(address)

    def _watch(self) -> None:
        recorded, looked, served = 0.0, 0.0, time.monotonic()
        while self._trouble is None and not self._is_over():
            if self._taken or self._state.plan.num_workers:
                served = time.monotonic()
            elif time.monotonic() - served > self._launch.node_wait:
                raise PeerDiedError(
                    f"No other machine is left, for {self._launch.node_wait:g} s (--node-wait), and there is no worker "
                    "on this one. A machine that Ray has declared dead comes back with a new `ray start` only."
                )
            if time.monotonic() - recorded > RECORD_EVERY_S:
                recorded = time.monotonic()
                self._record()
            if time.monotonic() - looked > HEAD_EVERY_S:
                looked = time.monotonic()
                self._look_for_the_head()
            time.sleep(LOOK_S)

    def _look_for_the_head(self) -> None:
        """Say so when it is lost: Ray ends this process, but only after a minute, and says so only in the log."""
        if (lost := not answers(self._cluster.head)) == self._head_is_lost:
            return
        self._head_is_lost = lost
        if not lost:
            logger.info("The head of Ray answers again")
            return
        here = self._state.plan.num_workers
        logger.warning(
            "Ray is gone: {}. The other nodes end in about a minute, and join again if Ray is started again, the head "
            "first (`ray start --head`)",
            "nobody is left on this machine"
            if not here
            else f"{counted(here, 'local worker')} continue{'s' * (here == 1)}",
        )

    def _is_over(self) -> bool:
        """As for a worker: where the launcher is killed, the server of a deterministic run still needs its nodes."""
        if self._run.has_ended():
            return True
        is_orphan = os.getppid() != self._launched_by
        needed = is_orphan and self._state.plan.training.deterministic and server_alive(self._run.root)
        return self._stop.requested and not needed

    def _wait_for_machines(self) -> list[Machine]:
        """As many as were asked for. `UsageError` says what is there instead."""
        wanted = self._launch.nodes - 1 if self._launch.nodes else int(self._launch.trainer_nodes == 1)
        deadline = time.monotonic() + self._launch.node_wait
        while True:
            machines = self._cluster.machines()
            usable = [machine for machine in machines if self._has_capacity(machine) and answers(machine.address)]
            if len(usable) >= wanted or self._is_over():
                return usable
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{wanted + 1} nodes were asked for, {len(usable) + 1} are there after "
                    f"{self._launch.node_wait:g} s (--node-wait): "
                    f"{', '.join(map(self._state_of, machines)) or 'this one alone'}. Start Ray on the others (`ray "
                    "start --address=…`), or ask for fewer: --nodes."
                )
            time.sleep(LOOK_S)

    def _has_capacity(self, machine: Machine) -> bool:
        """Whether its workers would start now: what others have taken of it is not counted on."""
        workers, gpus = self._size_of(machine)
        return machine.free_cpus >= CPUS_A_WORKER * workers and machine.free_gpus >= gpus

    def _state_of(self, machine: Machine) -> str:
        if self._has_capacity(machine):
            return f"{machine.name}: {machine.free}"
        workers, gpus = self._size_of(machine)
        needs = f"{CPUS_A_WORKER * workers:g} CPUs" + (f" and {counted(gpus, 'GPU')}" if gpus else "")
        return f"{machine.name}: {machine.free}, too little for {counted(workers, 'worker')} ({needs})"

    # The thread of one node

    def _guarded(self, number: int) -> None:
        try:
            while self._goes_on.is_set():
                self._once(number)
        except BaseException as error:  # noqa: BLE001 - a thread has no caller: raised in the main thread
            self._trouble = self._trouble or error

    def _once(self, number: int) -> None:
        """Serve one machine, until it is lost."""
        machine = self._choose(number)
        if machine is None:
            self._say_who_is_missing(number)
            self._pause()
            return
        workers, gpus = self._size_of(machine)
        logger.info("starting {} on {}, to be dev{}", counted(workers, "worker"), machine.name, number)
        node = self._cluster.start(machine, workers=workers, gpus=gpus)
        try:
            self._serve(number, machine, node, workers, gpus)
        except PeerDiedError as error:
            if self._goes_on.is_set():
                self._lost(number, machine, error)
                self._pause(2 ** min(self._failed_starts.get(number, 0), MOST_DOUBLINGS))
        except (NodeRefused, NodeGaveUp, UsageError) as error:
            self._end(node)
            if number not in self._has_joined and not isinstance(error, NodeGaveUp):
                raise
            self._unusable.add(machine.node_id)
            self._lost(number, machine, error)
        else:
            self._end(node)
        finally:
            node.kill()
            with self._mutex:
                self._taken.pop(machine.node_id, None)

    def _say_who_is_missing(self, number: int) -> None:
        """Ray may have lost the machine, too; then it comes back by no means of its own."""
        row = self._rows.get(number)
        if row is None or not row.gone or row.gone.startswith(LOST):
            return
        there = {machine.name: machine for machine in self._cluster.machines()}
        if row.name not in there:
            row.gone = f"{LOST}. Start it there again: ray start --address={self._cluster.head}"
            logger.warning("{} {}", row.name, row.gone)
        elif not row.gone.startswith(TAKEN) and time.monotonic() - row.gone_s > START_S:  # not by its last actor
            row.gone = f"{TAKEN}: {self._state_of(there[row.name])}"
            logger.warning("{} waits: {}", row.name, row.gone)

    def _lost(self, number: int, machine: Machine, error: AsyncGRPOError) -> None:
        self._has_joined.add(number)
        row = self._rows.setdefault(number, NodeRecord(name=machine.name, worker=f"dev{number}", number=number))
        if (row.name, row.gone) != (machine.name, str(error)):
            logger.warning("{} {}: its groups are pending again", machine.name, error)
        row.name, row.gone, row.gone_s, row.losses = machine.name, str(error), time.monotonic(), row.losses + 1

    def _serve(self, number: int, machine: Machine, node: RayNode, workers: int, gpus: int) -> None:
        began = time.monotonic()
        self._failed_starts[number] = self._failed_starts.get(number, -1) + 1
        used = f"its CPUs or GPUs may be used by others ({machine.free} before)"
        self._compare(machine, self._await(node.facts(), START_S, used))
        busy = "the machine may be busy, or its disk slow"
        why = self._await(node.begin(self._order(number, workers, gpus)), BEGIN_S, busy)
        if why and number in self._has_joined:  # it may be a disk that is full for a while
            raise PeerDiedError(f"cannot have workers now: {why}")
        if why:
            raise NodeRefused(f"{machine.name}: {why}")
        device = f"{machine.name}: {counted(workers, 'worker')}"
        run_id, stall_s = self._state.run_id, self._state.plan.training.stall_warning
        with closing(self._queue(number, device, workers)) as queue:
            logger.info(
                "{} joins as dev{}: versions and setup file as here, {}, after {}",
                machine.name,
                number,
                counted(workers, "worker"),
                for_people(time.monotonic() - began),
            )
            self._failed_starts.pop(number)
            before = self._rows.get(number, NodeRecord(number=number))
            row = self._rows[number] = replace(
                before, name=machine.name, worker=queue.name, workers=workers, gone="", gone_s=0.0
            )
            activity = Activity()  # only now: one without the lock would be a dead worker
            activity.publish(
                self._run.root, queue.name, device=device, run_id=run_id, state=LOADING, stall_after_s=stall_s
            )
            FarNodeSeat(
                node,
                queue,
                self._versions,
                self._state.plan,
                name=machine.name,
                workers=workers,
                states=self._run.trainer_states,
                log=self._run.node_log(machine.name),
                activity=activity,
                figures=row,
            ).serve(self._goes_on)

    def _queue(self, number: int, device: str, workers: int) -> WorkerQueue:
        try:
            return WorkerQueue.open(self._run.root, number, device, far_workers=workers)
        except QueueError as error:  # a worker that was started by hand has the number
            raise PeerDiedError(f"cannot join: {reason_of(error)}") from error

    def _end(self, node: RayNode) -> None:
        with suppress(Exception):  # it is killed next
            node.end(self._run.has_ended()).result(END_S)

    def _choose(self, number: int) -> Machine | None:
        """Take a free machine; None: there is none. Ray lists one that was restarted twice for a minute or two."""
        for machine in self._cluster.machines():
            if machine.node_id in self._taken.keys() | self._unusable:
                continue
            if not self._has_capacity(machine) or not answers(machine.address):
                continue
            with self._mutex:
                if machine.node_id not in self._taken:
                    self._taken[machine.node_id] = number
                    return machine
        return None

    def _size_of(self, machine: Machine) -> tuple[int, int]:
        """Workers and GPUs. One worker each, where there are GPUs."""
        workers = self._launch.workers_per_node or machine.gpus or DEFAULT_WORKERS
        return workers, min(workers, machine.gpus)

    def _order(self, number: int, workers: int, gpus: int) -> dict[str, Any]:
        devices = [str(index % gpus) for index in range(workers)] if gpus else ["cpu"] * workers
        is_local = self._launch.ray == LOCAL
        return {
            "state": json.dumps(as_json(self._state)),
            "number": number,
            "tree": self._tree,
            "devices": devices,
            "threads": os.environ.get("OMP_NUM_THREADS") if is_local else None,
            "node_dir": self._launch.node_dir,
            "folder": str(Path.cwd()),
        }

    def _compare(self, machine: Machine, found: dict[str, Any]) -> None:
        """`UsageError` where a node has other versions than this machine."""
        here = self._facts["versions"]
        for name, version in found["versions"].items():
            if version != here.get(name):
                raise UsageError(
                    f"{machine.name} has {name} {version or '(not installed)'}, and the server "
                    f"{here.get(name) or '(not installed)'}. Install the same on all nodes."
                )
        named = {"cpu": "processors", "gpus": "GPUs"}
        others = [words for what, words in named.items() if found[what] != self._facts[what]]
        if self._state.plan.training.deterministic and others:
            raise UsageError(
                f"--deterministic: {machine.name} has other {' and '.join(others)} than the server, which may compute "
                "other bits. Use nodes of one kind, or leave --deterministic out."
            )

    def _await(self, answer: Future[Any], seconds: float, why: str) -> Any:
        """What a node answers. `PeerDiedError`: nothing, in this time; `why` says what may be the reason."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return answer.result(LOOK_S)
            except NotYet:
                if not self._goes_on.is_set():
                    raise PeerDiedError("the run is over") from None
                if time.monotonic() > deadline:
                    raise PeerDiedError(f"has not started within {seconds:g} s: {why}") from None
            except Exception as error:
                raise PeerDiedError(f"cannot start: {words_of(error)}") from error

    def _pause(self, times: int = 1) -> None:
        deadline = time.monotonic() + AGAIN_S * times
        while self._goes_on.is_set() and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def _record(self) -> None:
        """Write `nodes.json`, for `status`, metrics and the summary."""
        with suppress(AsyncGRPOError, OSError):
            rows = tuple(self._rows[number] for number in sorted(self._rows))
            write_nodes(self._run.nodes, NodesRecord(head=self._cluster.head, nodes=rows))
