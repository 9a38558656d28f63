"""Machines for tests: namespaces of PIDs, mounts, network, names, IPC and clocks, which share nothing but a link.

Each has its own /tmp and /dev/shm, sees all else read-only, and is an address on a bridge that is in a namespace as
well. Nothing is made on the machine that the tests run on: with its first process the kernel removes a machine, with
its link.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from async_grpo.queue.names import COMPLETE, parse_name
from kit.runs import ROOT

PORT = 6379
STORE_BYTES = 100_000_000
RAY = (sys.executable, "-m", "ray.scripts.scripts")
RAY_START_S = 300.0
STARTS = 4
SLOW = {"RAY_health_check_failure_threshold": "40", "RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}
"""Settings of Ray for a busy machine: a raylet may be silent for longer, and actors have no niceness of 15."""
OF_RAY = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "/ray/", "ray.util")  # in its commands
NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--time")
STARTED_S = 1000  # between the starts of two machines, by their monotonic clocks


def why_not() -> str:
    """Why there can be no machines here; empty if there can."""
    if os.geteuid():
        return "only root can make namespaces of PIDs, mounts and network"
    if missing := [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed here (Debian: iproute2, util-linux)"
    if ROOT.is_relative_to("/tmp"):
        return "this checkout is in /tmp, where each machine has a folder of its own"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"unshare: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """One of them. `folder` is its /tmp."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.name, self.address = number, f"gpu{number}", f"10.42.0.{number}"
        self.folder = folder
        self.env = {"HOME": "/tmp"}  # where a token would be
        self.turn_on()

    def turn_on(self) -> None:
        """Make it, with its /tmp as it was. It has no link yet."""
        self.folder.mkdir(mode=0o1777, exist_ok=True)
        init = [sys.executable, str(Path(__file__).parent / "machine_init.py"), self.name, str(self.folder)]
        clocks = [f"--{clock}={self.number * STARTED_S}" for clock in ("monotonic", "boottime")]
        self._unshare = subprocess.Popen(
            ["unshare", *NAMESPACES, *clocks, "--fork", "--kill-child", "--mount-proc", *init],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "ready\n", "a machine could not be made"
        self.first = psutil.Process(self._unshare.pid).children()[0]

    def turn_off(self) -> None:
        """As when its power fails."""
        assert self._unshare.stdin is not None and self._unshare.stdout is not None
        self._unshare.stdout.close()
        self._unshare.stdin.close()
        self._unshare.wait(60)

    def enter(self) -> list[str]:
        """Begin a command that is to run there."""
        return ["nsenter", "--target", str(self.first.pid), *NAMESPACES, "--wd"]  # that of its first process

    def run(self, *command: str, deadline_s: float = RAY_START_S, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command there, to its end."""
        return subprocess.run(
            [*self.enter(), *command],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **self.env, **env},
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            start_new_session=True,  # the kernel shares the processor out between sessions first
        )

    def start_ray(self, *, head: Machine | None = None, cpus: int = 4) -> None:
        """`ray start` there: the head of a cluster, or one that joins it."""
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if head is not None:
            where = [f"--address={head.address}:{PORT}"]
        arguments = [*where, f"--node-ip-address={self.address}", f"--node-name={self.name}", "--disable-usage-stats"]
        arguments += [f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={STORE_BYTES}"]
        for _ in range(STARTS):  # a raylet ends itself where its agents take more than 15 s to start
            ran = self.run(*RAY, "start", *arguments, **SLOW)
            if ran.returncode == 0:
                return
            self.run(*RAY, "stop", "--force")
        raise AssertionError(f"{ran.stdout}{ran.stderr}")

    def processes(self) -> list[psutil.Process]:
        """All that run there, but its first."""
        mine = namespace_of(self.first.pid)
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and process.pid != self.first.pid and namespace_of(process.pid) == mine:
                    found.append(process)
        return found

    def having(self, *words: str) -> list[psutil.Process]:
        """Return the processes with these words in their command."""
        return [process for process in self.processes() if all(word in line_of(process) for word in words)]

    def ours(self) -> list[psutil.Process]:
        """Those that are not Ray's own."""
        return [process for process in self.processes() if not any(word in line_of(process) for word in OF_RAY)]

    def freeze(self) -> list[psutil.Process]:
        """Stop every process there."""
        frozen = self.processes()
        for process in frozen:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        return frozen


class Machines(list[Machine]):
    """Machines on one bridge. The first is the server's, and has the head of Ray."""

    def __init__(self, count: int, folder: Path, stack: ExitStack) -> None:
        self._switch = Machine(200, folder / "switch")
        stack.callback(self._switch.turn_off)
        self._ip("link", "add", "bridge", "type", "bridge")
        self._ip("link", "set", "bridge", "up")
        for number in range(1, count + 1):
            machine = Machine(number, folder / f"gpu{number}")
            stack.callback(machine.turn_off)
            self.append(machine)
            self._connect(machine)

    def start_ray(self) -> None:
        head, *others = self
        head.start_ray(cpus=1)
        for machine in others:
            machine.start_ray(head=head)

    def turn_on(self, machine: Machine) -> None:
        """Turn on a machine that was turned off, with its link."""
        machine.turn_on()
        self._connect(machine)

    def pull(self, machine: Machine) -> None:
        """Take its link down."""
        self._ip("link", "set", f"port{machine.number}", "down")

    def plug(self, machine: Machine) -> None:
        self._ip("link", "set", f"port{machine.number}", "up")

    def _connect(self, machine: Machine) -> None:
        port = f"port{machine.number}"
        peer = ("peer", "name", "eth0", "netns", str(machine.first.pid))
        self._ip("link", "add", port, "type", "veth", *peer)
        self._ip("link", "set", port, "master", "bridge", "up")
        for arguments in (("addr", "add", f"{machine.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            ran = machine.run("ip", *arguments)
            assert ran.returncode == 0, ran.stderr

    def _ip(self, *arguments: str) -> None:
        # The network alone: the peer's PID is one of the machine that the tests run on.
        command = ["nsenter", "--target", str(self._switch.first.pid), "--net", "ip", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


@contextmanager
def machines(count: int, folder: Path) -> Iterator[Machines]:
    """So many machines, without Ray. At the end of the block none is left."""
    with ExitStack() as stack:
        yield Machines(count, folder, stack)


def namespace_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/ns/pid").readlink()


def line_of(process: psutil.Process) -> str:
    """The command of a process; empty once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def groups_of(run_dir: Path) -> int:
    """Groups that the trainer has taken."""
    names = (parse_name(path.name) for path in (run_dir / "done").rglob("*"))
    return sum(name is not None and name.state == COMPLETE for name in names)


def claims_of(run_dir: Path, worker: str) -> set[str]:
    return {path.name for path in (run_dir / "queue").glob(f"*_processing_by_{worker}.*")}
