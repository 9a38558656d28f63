"""A trainer on several machines: who is there when it starts, and which rank or machine falls silent.

`accelerate` starts the ranks of each machine, and torch.distributed carries what they compute. This is what both lack:
a start that names who is missing or differs, and an end within seconds where a rank, a machine or the link is gone. All
of it is a TCPStore of torch's, at the address of `--main-process`, held by the process that starts machine 0's ranks.

    at the start   each machine tells its name, versions and setup file; machine 0 answers with the run, or why not
    meanwhile      each rank, and what starts the ranks of each machine, sets its beat; each rank looks at all others'

The store has no authentication, as torch.distributed has none: the network between the machines is trusted. What is
read from it is JSON. It listens on the named address alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from async_grpo.errors import PeerDiedError, UsageError
from async_grpo.rundir.shape import shaped
from async_grpo.setup.process import StopRequest, is_alive, leave_at_once
from async_grpo.telemetry.ranks_file import Beat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ADDRESS = "ASYNC_GRPO_MAIN_PROCESS"  # of the environment of ranks of several machines
BEAT_S = 1.0
SILENT_S = 25.0  # then a rank or machine counts as gone: the others have ended within 30 s
ANSWER_S = 10.0  # of the store
_ENDED, _ANSWER = "ended", "answer"


@dataclass(frozen=True, slots=True)
class TrainerMachine:
    """Which of how many machines of the trainer this is, and where they meet."""

    number: int
    count: int
    address: str  # HOST:PORT of machine 0

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


def hold(here: TrainerMachine) -> Store:
    """The store of machine 0. `UsageError`: the address is not this machine's, is taken, or no other can reach it."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((here.host, here.port))
        listening.listen(socket.SOMAXCONN)
    except OSError as error:
        raise UsageError(
            f"--main-process {here.address}: machine 0 cannot listen there ({error.strerror}). Name an address of "
            "machine 0 that the others reach, and a port that is free."
        ) from error
    if (address := listening.getsockname()[0]).startswith("127.") and address != here.host:
        raise UsageError(
            f"--main-process {here.address}: {here.host} is {address} on this machine, as /etc/hosts often says of its "
            "own name, and no other machine can connect to that. Name machine 0 by its address in the network."
        )
    return _store(here, listening.detach())


def reach(here: TrainerMachine, wait_s: float) -> Store:
    """The store of machine 0, from another process. `UsageError`: it has not answered in this time."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((here.host, here.port), timeout=ANSWER_S).close()
            return _store(here)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's, of a port that something else has
            if time.monotonic() > deadline:
                raise UsageError(
                    f"--main-process {here.address}: machine 0 has not answered within {wait_s:g} s ({error}). Start "
                    "it there with --machine-rank 0, and see that the port can be reached from here."
                ) from error
        time.sleep(BEAT_S)


def _store(here: TrainerMachine, listening: int | None = None) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there, and not exported

    return TCPStore(
        here.host,
        here.port,
        is_master=listening is not None,
        timeout=timedelta(seconds=ANSWER_S),
        wait_for_workers=False,
        multi_tenant=True,  # torch's own rendezvous is in it as well, and so needs no port of its own
        master_listen_fd=listening,
    )


def call_roll(
    store: Store, here: TrainerMachine, mine: Mapping[str, Any], run: Mapping[str, Any], wait_s: float
) -> None:
    """Machine 0: wait for the others, compare what they have, and answer with the run.

    Args:
        mine: {"name": of the machine, and what must be equal on all: "versions", "setup" and "ranks"}.

    Raises:
        UsageError: one is missing, or differs. Those that are there hear the same.
    """
    store.set(_about(0), json.dumps(mine))
    try:
        _compare(mine, _all_there(store, here, wait_s))
    except UsageError as refusal:
        store.set(_ANSWER, json.dumps({"refused": str(refusal)}))
        time.sleep(2 * BEAT_S)  # the store ends with this process
        raise
    store.set(_ANSWER, json.dumps(run))


def answer_roll(store: Store, here: TrainerMachine, mine: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
    """Another machine: say that it is here, and return the run of machine 0.

    Raises:
        UsageError: what machine 0 has refused, or there is such a machine already.
        PeerDiedError: machine 0 has ended.
    """
    if store.add(f"taken/{here.number}", 1) > 1:
        raise UsageError(f"--machine-rank {here.number}: another machine has said so. Each has a number of its own.")
    store.set(_about(here.number), json.dumps(mine))
    deadline = time.monotonic() + wait_s + ANSWER_S
    try:
        while not store.check([_ANSWER]):
            if time.monotonic() > deadline:
                raise UsageError(f"Machine 0 has not begun within {wait_s:g} s. Its own output says why.")
            time.sleep(BEAT_S / 4)
            socket.create_connection((here.host, here.port), timeout=ANSWER_S).close()  # `check` waits for ever
        found: dict[str, Any] = json.loads(store.get(_ANSWER))
    except (RuntimeError, OSError) as error:
        raise PeerDiedError(f"Machine 0 ({here.address}) has ended before the start. Its output says why.") from error
    except BaseException:  # Ctrl-C as well: machine 0 is not to count on this one
        for key in (_about(here.number), f"taken/{here.number}"):
            store.delete_key(key)
        raise
    if "refused" in found:
        raise UsageError(str(found["refused"]))
    return found


def _all_there(store: Store, here: TrainerMachine, wait_s: float) -> list[dict[str, Any]]:
    deadline = time.monotonic() + wait_s
    while missing := [number for number in range(here.count) if not store.check([_about(number)])]:
        if time.monotonic() > deadline:
            raise UsageError(
                f"{here.count} machines were asked for (num_machines), and of --machine-rank "
                f"{', '.join(map(str, missing))} nothing was heard within {wait_s:g} s (--node-wait). Start the same "
                f"command there with --machine-rank {missing[0]} --main-process {here.address}."
            )
        time.sleep(BEAT_S / 4)
    return [json.loads(store.get(_about(number))) for number in range(here.count)]


def _compare(mine: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    for number, other in enumerate(found):
        who = f"Machine {number} ({other['name']})"
        for name, version in mine["versions"].items():
            if (theirs := other["versions"].get(name, "")) != version:
                raise UsageError(
                    f"{who} has {name} {theirs or '(not installed)'}, and machine 0 {version or '(not installed)'}. "
                    "Install the same on all."
                )
        for what, words in (("setup", "setup file"), ("ranks", "accelerate configuration")):
            if other[what] != mine[what]:
                raise UsageError(f"{who} has another {words} than machine 0. Copy it there: all build one trainer.")


def _about(number: int) -> str:
    return f"machine/{number}"


def interface_of(here: TrainerMachine, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that let gloo and NCCL use the interface that leads to machine 0, unless `env` names one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((here.host, here.port))
        mine = probe.getsockname()[0]
    found = [name for name, addresses in psutil.net_if_addrs().items() if any(it.address == mine for it in addresses)]
    return {name: found[0] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if found and name not in env}


@dataclass
class _Other:
    """What was heard of a rank or machine."""

    beat: Beat = field(default_factory=Beat)
    heard_s: float = field(default_factory=time.monotonic)  # when `count` changed


class Heartbeat:
    """Says that a rank lives, or what starts the ranks of a machine; ends a rank where another does not.

    The main thread may be in a collective that nobody answers any more, which nothing interrupts. So the thread that
    finds out says why on standard error, and ends the process.

    Args:
        me: a rank or a machine, as people read it.
        store: nobody else may use this connection.
        watched: who is missed after `SILENT_S`: machines from now on, ranks from their first beat on.
        patience_s: so much later than others this one ends, so that ranks may say why first.
        stop: set where any rank was asked to end.
        failed: told the reason before the process ends.
        report: told what all others said, once a beat.
    """

    def __init__(
        self,
        here: TrainerMachine,
        me: str,
        store: Store,
        watched: Sequence[str],
        *,
        patience_s: float = 0.0,
        stop: StopRequest | None = None,
        failed: Callable[[str], None] = lambda why: None,
        report: Callable[[Mapping[str, Beat]], None] = lambda beats: None,
    ) -> None:
        self.mine = Beat()
        self.here, self.me, self._store = here, me, store
        self._stop, self._failed, self._report = stop, failed, report
        self._others = {name: _Other() for name in watched if name != me}
        self._answered_s, self._patience_s = time.monotonic(), patience_s
        self.siblings: Mapping[int, psutil.Process] = {}  # ranks on this machine
        for loop in (self._exchange, self._judge):
            threading.Thread(target=loop, name="heartbeat", daemon=True).start()

    @classmethod
    def of_machine(cls, here: TrainerMachine, **options: Any) -> Heartbeat:
        """The heartbeat of the process that starts this machine's ranks, which misses others while there are none."""
        store = reach(here, ANSWER_S)
        names = _machines(store, here)
        return cls(here, names[here.number], store, names, patience_s=SILENT_S, **options)

    @classmethod
    def of_rank(cls, env: Mapping[str, str] = os.environ, **options: Any) -> Heartbeat | None:
        """The heartbeat of this rank; None where the trainer is on one machine. `options`: as of this class."""
        if (address := env.get(ADDRESS)) is None:
            return None
        ranks, each = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
        here = TrainerMachine(int(env["GROUP_RANK"]), ranks // each, address)
        store = reach(here, ANSWER_S)
        machines = _machines(store, here)
        names = [f"rank {rank} on {machines[rank // each]}" for rank in range(ranks)]
        return cls(here, names[int(env["RANK"])], store, [*machines, *names], **options)

    def say_ended(self, why: str) -> None:
        """Tell all ranks what has ended here. The first that is told counts: others end by it."""
        self._tell(why)
        self.leave()

    def say_stopped(self) -> None:
        """Tell all ranks that this machine was asked to end, unless rank 0 has ended the training in good order."""
        key = f"beat/rank 0 on {self.me}"
        with suppress(RuntimeError, UsageError):
            store = reach(self.here, 0)
            if store.check([key]) and shaped(Beat, json.loads(store.get(key))).left:
                return
        self.say_ended(f"{self.me} was asked to end")

    def lost(self, rank: int, pid: int) -> str:
        """Tell all that a rank of this machine has died; returns what was told first, which others may have died of."""
        return self._tell(f"rank {rank} on {self.me.rpartition(' on ')[2]} (pid {pid}) has died")

    def _tell(self, why: str) -> str:
        with suppress(RuntimeError, UsageError):  # machine 0 may have ended before
            return reach(self.here, 0).compare_set(_ENDED, "", why).decode()
        return why

    def leave(self) -> None:
        """This process ends in good order: the others shall not miss it."""
        self.mine.left = True
        time.sleep(3 * BEAT_S)  # by then `_exchange` has ended: within torch it could abort the process at its end

    def _exchange(self) -> None:
        is_last = False
        while not is_last:
            is_last = self.mine.left
            with suppress(Exception):  # mostly torch's: the store is gone, or the link; `_judge` says so in time
                self._beat()
            time.sleep(BEAT_S)

    def _beat(self) -> None:
        mine, stop = self.mine, self._stop
        mine.count += 1
        mine.stop = stop is not None and stop.requested
        self._store.set(f"beat/{self.me}", json.dumps(vars(mine)))
        if self._store.check([_ENDED]):
            time.sleep(self._patience_s)
            self._end(self._store.get(_ENDED).decode())
        for name, other in self._others.items():
            if self._store.check([f"beat/{name}"]):
                beat = shaped(Beat, json.loads(self._store.get(f"beat/{name}")))
                if beat.count != other.beat.count:
                    other.beat, other.heard_s = beat, time.monotonic()
        self._answered_s = time.monotonic()
        if stop is not None and any(other.beat.stop for other in self._others.values()):
            stop.requested = True
        self._report({name: other.beat for name, other in self._others.items()})

    def _judge(self) -> None:
        while not self.mine.left:
            now, silent_s = time.monotonic(), SILENT_S + self._patience_s
            for rank, process in self.siblings.items():
                if not is_alive(process) and not self._has_left(rank):
                    self._end(self.lost(rank, process.pid))
            if now - self._answered_s > silent_s:
                self._end(f"machine 0 ({self.here.address}) cannot be reached for {silent_s:g} s")
            missed = [name for name, other in self._others.items() if self._misses(name, other, now)]
            if missed:  # a machine before its ranks
                self._end(f"{min(missed)} has not answered for {silent_s:g} s")
            time.sleep(BEAT_S)

    def _has_left(self, rank: int) -> bool:
        return any(other.beat.left for name, other in self._others.items() if name.startswith(f"rank {rank} "))

    def _misses(self, name: str, other: _Other, now: float) -> bool:
        has_begun = other.beat.count > 0 or name.startswith("machine")
        return has_begun and not other.beat.left and now - other.heard_s > SILENT_S + self._patience_s

    def _end(self, why: str) -> None:
        if self.mine.left:
            return
        self.mine.left = True
        said = lost_process(why)
        try:
            print(f"error: {said}", file=sys.stderr, flush=True)
            self._failed(said)
        finally:
            leave_at_once(PeerDiedError.exit_code)


def lost_process(why: str) -> str:
    return f"The trainer has lost a process: {why}. Start again with --resume, on the machines that are left."


def _machines(store: Store, here: TrainerMachine) -> list[str]:
    """The machines, as people read them. All have been at the roll call."""
    hosts = [json.loads(store.get(_about(number)))["name"] for number in range(here.count)]
    return [f"machine {number} ({host})" for number, host in enumerate(hosts)]
