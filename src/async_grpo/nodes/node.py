"""The far side: what the actor on another machine does, for ordinary workers there. It knows nothing of Ray.

`FarNode` is the server of a queue and of weights in a run directory of its own, and starts the workers. `exchange`
brings jobs and takes groups, `take_weights` gets a version; Ray calls them in threads of their own.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from async_grpo.errors import AsyncGRPOError, RunRefused, reason_of
from async_grpo.launch.child_log import LogTail
from async_grpo.launch.launcher import REFUSED, worker_child
from async_grpo.launch.supervisor import Exits, Supervisor
from async_grpo.nodes import leftovers
from async_grpo.nodes.tree import is_there, unpack
from async_grpo.queue import ServerQueue
from async_grpo.queue.codec import MAX_FILE_BYTES, decode_job
from async_grpo.queue.names import shard
from async_grpo.records import Job
from async_grpo.rundir import paths as runs
from async_grpo.rundir.files import LineFile
from async_grpo.rundir.folders import check_folder, is_ours, make_folder
from async_grpo.rundir.locks import server_alive, server_lock
from async_grpo.rundir.paths import RunDir, RunState, activity_file
from async_grpo.rundir.reading import parse_object, read_file
from async_grpo.rundir.shape import shaped
from async_grpo.rundir.system_errors import sentence_of
from async_grpo.settings import CPU
from async_grpo.setup.devices import threads_per_process
from async_grpo.setup.fingerprints import versions
from async_grpo.setup.process import end_with_parent, path_to_us
from async_grpo.telemetry.activity import LOADING, SCORING, STARTING, read_activity
from async_grpo_ipc.handle import PATH_VARIABLE

if TYPE_CHECKING:
    from async_grpo.deltas.coding import Bytes
    from async_grpo.nodes.receiving import ReceivedWeights

POLL_S = 1.0  # how long an exchange waits for something to say
LOOK_S = 0.5
SCORED_LOOK_S = 0.05  # between looks at what the workers do, while an exchange waits
LEAST_FREE_BYTES = 2**20  # of a disk, for a run directory to begin with
KEEP_DONE = 64  # groups that a node's archive keeps
MOST_LOG_LINES = 200  # an exchange
END_S = 8.0  # for the workers to leave a run that has ended
PACKAGES = ("ray", "torch", "transformers", "trl", "vllm")


class SentJob(NamedTuple):
    """A job for a node: not to be started by weights that are older than `version`."""

    version: int
    attempt: int
    data: bytes  # of its queue file


@dataclass(kw_only=True)
class Exchanged:
    """What an exchange brings back, but for the groups as plain values."""

    groups: list[tuple[int, bytes]] = field(default_factory=list)  # number, and the file
    failures: list[tuple[int, str]] = field(default_factory=list)  # number, and the reason
    log: list[str] = field(default_factory=list)
    workers: int = 0  # that can take a job
    scored: int = 0  # groups that are sampled, and wait for their rewards or get them
    version: int | None = None  # that they can see
    refused: str = ""  # a worker's refusal, which ends the run
    waited_s: float = 0.0  # for something to say
    gave_up: str = ""  # why this node cannot go on


class FarNode:
    """The actor. Its methods are called in several threads."""

    def __init__(self) -> None:
        end_with_parent(os.getppid(), signal.SIGKILL)  # the raylet
        os.environ.pop(PATH_VARIABLE, None)  # of the server's machine

    def facts(self) -> dict[str, Any]:
        """What must be as on the server's machine, or tells the machines apart."""
        return facts()

    def begin(self, order: dict[str, Any]) -> str:
        """Make the run directory, and start the workers. Returns why that cannot be, empty if it can."""
        try:
            self._side = _RunHere(order)
        except AsyncGRPOError as error:
            return str(error)
        except OSError as error:  # no space, no right; a write that fails names no file
            named = OSError(error.errno, error.strerror, error.filename or _parent_of(order))
            return sentence_of(named) or reason_of(named)
        return ""

    def exchange(self, jobs: list[tuple[int, int, bytes]], states: bytes) -> dict[str, Any]:
        """Bring jobs and lines of `trainer_states.jsonl`, and wait a moment for what there is to say."""
        return vars(self._side.exchange([SentJob(*job) for job in jobs], states))

    def take_weights(self, about: dict[str, Any], data: Bytes) -> dict[str, Any]:
        """Take a piece of a version that has arrived here."""
        return self._side.receive(about, data)

    def end(self, finished: bool) -> None:
        """End the workers, and delete the run directory. Those of a finished run leave by themselves."""
        self._side.end(finished=finished)


class _RunHere:
    """The run on this machine."""

    def __init__(self, order: dict[str, Any]) -> None:
        state = shaped(RunState, parse_object(order["state"]))
        root = _folder_for(order, state.run_id)
        self._cleaner = _cleaner_of(root)
        try:
            self._run, state = _prepare(order, state, root)
        except BaseException:  # a full disk, say
            self._cleaner.close()
            raise
        self._lock = server_lock(self._run.root)
        self._lock.try_acquire({"role": "parameter server"})
        self._queue = ServerQueue.open(self._run.root, state.run_id, max_attempts=1, lock=self._lock)
        self._state, self._finished = state, False
        self._states = LineFile(self._run.trainer_states)
        self._mutex = threading.Lock()  # of the queue
        self._changed = threading.Condition()  # of the answer
        self._answer = Exchanged()
        self._held: deque[tuple[SentJob, Job]] = deque()  # until their weights are here
        self._turn = 0
        self._said_scored = 0
        self._ready: set[tuple[str, int]] = set()  # name and pid of each worker
        self._ended = threading.Event()
        children = [
            worker_child(state.plan, self._run, number, self._needs_workers, _environment(state, order["threads"]))
            for number in range(1, len(state.plan.worker_devices) + 1)
        ]
        self._names = [child.name for child in children]
        self._logs = {child.name: LogTail(child.log, child.name) for child in children}
        self._weights = _weights_at(self._run.weights_handle, workers=len(children))
        self._supervisor = Supervisor(children, say=self._say, look=self._look)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("workers", self._watch_workers), ("groups", self._collect))
        ]
        for thread in self._threads:
            thread.start()

    def exchange(self, jobs: list[SentJob], states: bytes) -> Exchanged:
        """The newest call waits; one that waits ends when another comes."""
        for line in states.decode().split("\n")[:-1]:
            self._states.append(line)
        with self._mutex:
            self._held += [(sent, decode_job(sent.data)) for sent in jobs]
            self._submit()
        with self._changed:
            self._turn = turn = self._turn + 1
            self._changed.notify_all()
            began = time.monotonic()
            while not self._has_news() and self._turn == turn and time.monotonic() < began + POLL_S:
                self._changed.wait(min(SCORED_LOOK_S, POLL_S))
            answer, self._answer = self._answer, Exchanged()
            answer.scored = self._said_scored = self._groups_scored()
        answer.waited_s = time.monotonic() - began
        answer.workers = self._ready_workers()
        answer.version = self._weights.published
        return answer

    def receive(self, about: dict[str, Any], data: Bytes) -> dict[str, Any]:
        answer = self._weights.receive(about, data)
        with self._mutex:
            self._submit()
        return dict(answer)

    def end(self, *, finished: bool) -> None:
        self._finished = finished
        result = runs.FINISHED if finished else runs.STOPPED
        with suppress(AsyncGRPOError, OSError):
            self._run.update_state(of=self._state.run_id, state=result)
        self._ended.set()
        self._supervisor.stop()
        for thread in self._threads:
            thread.join(2 * END_S)
        self._queue.close()
        self._weights.close()
        self._lock.release()
        shutil.rmtree(self._run.root, ignore_errors=True)
        self._cleaner.close()

    # Jobs and groups

    def _submit(self) -> None:
        """Issue the jobs whose weights workers can see."""
        version = self._weights.published
        waiting: deque[tuple[SentJob, Job]] = deque()
        for sent, job in self._held:
            if version is not None and sent.version <= version:
                self._queue.submit(job, attempt=sent.attempt)
            else:
                waiting.append((sent, job))
        self._held = waiting

    def _collect(self) -> None:
        """Move what is finished and what has failed to the answer, until the end."""
        while not self._ended.is_set():
            self._queue.wait(LOOK_S)
            try:
                with self._mutex:
                    groups, failures = self._finished_groups(), self._failures()
            except RunRefused as error:
                self._tell(refused=str(error))
                return
            except (AsyncGRPOError, OSError) as error:
                self._tell(gave_up=reason_of(error))
                return
            with self._changed:
                self._answer.groups += groups
                self._answer.failures += failures
                self._changed.notify_all()

    def _finished_groups(self) -> list[tuple[int, bytes]]:
        found = []
        for name in [*self._queue.finished("train"), *self._queue.finished("eval"), *self._queue.finished("generate")]:
            if self._queue.take(name) is not None:
                found.append((name.seq, bytes(read_file(self._run.root / shard(name.seq) / str(name), MAX_FILE_BYTES))))
        self._queue.trim_done(KEEP_DONE, _Everything())
        return found

    def _failures(self) -> list[tuple[int, str]]:
        failed = [(seq, given_up.reason) for seq, given_up in self._queue.given_up.items()]
        self._queue.given_up.clear()
        return failed

    def _has_news(self) -> bool:
        now = self._answer
        if now.groups or now.failures or now.refused or now.gave_up or self._ended.is_set():
            return True
        return self._groups_scored() > self._said_scored  # there is capacity for other jobs

    def _groups_scored(self) -> int:
        """How many groups get their rewards, as workers say once they have nothing left to sample."""
        records = (read_activity(activity_file(self._run.root, name)) for name, _ in list(self._ready))
        return sum(job.phase == SCORING for record in records if record is not None for job in record.jobs)

    def _tell(self, *, refused: str = "", gave_up: str = "") -> None:
        with self._changed:
            self._answer.refused = self._answer.refused or refused
            self._answer.gave_up = self._answer.gave_up or gave_up
            self._changed.notify_all()

    # Workers

    def _ready_workers(self) -> int:
        """Live workers that have loaded: a job that came before would wait, and the trainer for it."""
        alive = {(worker.name, worker.pid) for worker in self._queue.workers()}
        self._ready &= alive
        for name, pid in alive - self._ready:
            record = read_activity(activity_file(self._run.root, name))
            if record is not None and record.pid == pid and record.state not in (STARTING, LOADING):
                self._ready.add((name, pid))
        return len(self._ready)

    def _watch_workers(self) -> None:
        """Run the workers, in a thread that lives as long: the kernel ends a child with the thread that forked it."""
        with self._supervisor as supervisor:
            exits = dict(supervisor.run_until(self._cannot_go_on))
            if self._ended.is_set():
                supervisor.end(ask=not self._finished)
                return
            name = self._refused(exits) or self._names[0]
            words = self._logs[name].last_words()
            if self._refused(exits):
                self._tell(refused=words)
            else:
                self._tell(gave_up=f"every worker failed time and again. The last words of {name}:\n{words}")
            self._ended.wait()

    def _cannot_go_on(self, exits: Exits) -> bool:
        return bool(self._refused(exits)) or all(name in exits for name in self._names)

    def _refused(self, exits: Exits) -> str:
        found = (name for name in self._names if name in exits)
        return next((name for name in found if exits[name].code == REFUSED and exits[name].starts == 1), "")

    def _needs_workers(self) -> bool:
        return not self._ended.is_set()

    def _look(self) -> None:
        for log in self._logs.values():
            for line in log.new_lines():
                self._say(str(line))

    def _say(self, text: str) -> None:
        with self._changed:
            self._answer.log = [*self._answer.log, text][-MOST_LOG_LINES:]


def _weights_at(handle: Path, *, workers: int) -> ReceivedWeights:
    from async_grpo.nodes.receiving import ReceivedWeights  # and with it torch

    return ReceivedWeights(handle, workers)


class _Everything(Container[int]):
    def __contains__(self, number: object) -> bool:
        return True


def facts() -> dict[str, Any]:
    """Versions and hardware of this machine, as plain values."""
    from async_grpo_ipc.handle import boot_id

    return {
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "versions": versions(*PACKAGES),
        "cpu": _cpu(),
        "gpus": _gpus(),
    }


def _cpu() -> str:
    """Model and flags of the processor: other ones may compute other bits."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines if ":" in line}
    return f"{found.get('model name', platform.machine())}; {found.get('flags', found.get('Features', ''))}"


def _gpus() -> list[str]:
    """The models of this machine's GPUs, each once; none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return sorted({str(pynvml.nvmlDeviceGetName(handle)) for handle in handles})
    except pynvml.NVMLError:
        return []


def _parent_of(order: dict[str, Any]) -> str:
    return str(order["node_dir"] or tempfile.gettempdir())


def _folder_for(order: dict[str, Any], run_id: str) -> Path:
    """A new folder for the run directory of this node."""
    parent = Path(_parent_of(order))
    _tidy_up(parent, run_id)
    root = parent / f"async-grpo-{run_id}-{order['number']}-{os.getpid()}-{_birth(str(os.getpid()))}"
    check_folder(root)
    if shutil.disk_usage(parent).free < LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(parent))
    return make_folder(root)


def _prepare(order: dict[str, Any], state: RunState, root: Path) -> tuple[RunDir, RunState]:
    """The run directory of this node: the server's plan, with the paths and devices of here."""
    run = RunDir(root)
    config = state.plan.config
    if not is_there(order["tree"], config.parent):
        unpack(order["tree"], root / "setup")
        config = root / "setup" / config.name
    if Path(order["folder"]).is_dir():
        os.chdir(order["folder"])
    plan = replace(
        state.plan,
        config=config,
        worker_devices=tuple(order["devices"]),
        master_device=CPU,
        weights="host",
    )
    state = replace(state, plan=plan, state=runs.RUNNING, output_dir="", delta_dir="", undo=None, **run.where_it_is())
    run.write_state(state)
    return run, state


def _tidy_up(parent: Path, run_id: str) -> None:
    """Delete what a killed actor has left of this run here. Another one that begins has no lock in its folder yet."""
    for folder in parent.glob(f"async-grpo-{run_id}-*"):
        _, pid, birth = folder.name.rsplit("-", 2)
        if is_ours(folder) and _birth(pid) != birth and not server_alive(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _birth(pid: str) -> str:
    """When a process began, in ticks since the machine did. With the pid it names one process. Empty if it is gone."""
    with suppress(OSError):
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[19]  # field 22 of proc_pid_stat(5)
    return ""


def _cleaner_of(root: Path) -> IO[bytes]:
    """Start a process that deletes `root` when this file is closed, as the kernel does where this process is killed."""
    command = [sys.executable, "-I", "-S", leftovers.__file__, str(root)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert started.stdin is not None
    started.wait()  # its child goes on
    return started.stdin


def _environment(state: RunState, threads: str | None) -> dict[str, str]:
    """The environment of workers. What Ray has set for its own processes is not for them."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"PYTHONPATH": path_to_us(env), "PYTHONUNBUFFERED": "1"}
    env.setdefault("TQDM_DISABLE", "1")
    on_cpu = state.plan.worker_devices.count(CPU)
    if state.plan.training.deterministic:
        threads = "1"
    elif threads is None and on_cpu:
        threads = str(threads_per_process(on_cpu))
    return env if threads is None else {**env, "OMP_NUM_THREADS": threads}
