"""Which workers are alive, and the event of a worker's death.

A worker is alive while it holds its file `alive/NAME.lock`: the kernel decides, without heartbeats or clocks. Its death
is an event (a pidfd becomes readable), so its jobs are pending again within milliseconds, without polling.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import QueueError
from async_grpo.queue.wakeups import IN_CREATE, IN_MODIFY, DirectoryWatch
from async_grpo.records import WorkerId
from async_grpo.rundir.locks import KernelLock, server_lock

PROBE_S = 0.05  # between looks at a worker whose death cannot be an event (other pid namespace, old kernel)
LOOK_S = 1.0  # between looks at everything, in case an event went missing


class WorkerState(NamedTuple):
    """A live worker, by its lock and the holder's note in it."""

    id: WorkerId
    pid: int
    torch_device: str  # "cuda:1", "cpu"
    workers: int = 1  # for which it claims: those of another machine claim through one

    @property
    def name(self) -> str:
        return str(self.id)


def worker_lock(root: Path, worker: WorkerId | str) -> KernelLock:
    return KernelLock(root / "alive" / f"{worker}.lock")


def claims_for_others(note: Mapping[str, Any]) -> bool:
    """Whether the holder of a worker's lock claims for workers of another machine, by the note in it.

    Its death says nothing of those, so it counts as no attempt at what they had.
    """
    return note.get("far") is True


def live_workers(root: Path) -> list[WorkerState]:
    """Workers that are alive now, by number; none where there is no queue.

    A server that tidies up after a dead worker is not taken for it.
    """
    server = (server_lock(root).holder() or {}).get("pid")
    states = []
    for entry in (root / "alive").glob("*.lock"):
        worker = WorkerId.parse(entry.stem)
        holder = KernelLock(entry).holder() if worker else None
        if worker is None or holder is None or (holder["pid"] == server and "torch_device" not in holder):
            continue
        device, workers = str(holder.get("torch_device", "")), holder.get("workers", 1)
        states.append(WorkerState(worker, int(holder["pid"]), device, workers if type(workers) is int else 1))
    return sorted(states)


class Reaper:
    """A thread of the server that calls `recover` when a worker dies, and then `notify`."""

    def __init__(self, root: Path, recover: Callable[[], list[int]], notify: Callable[[], None]) -> None:
        self._root, self._recover, self._notify = root, recover, notify
        self._watch = DirectoryWatch({root / "alive": IN_CREATE | IN_MODIFY})
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pidfds: dict[tuple[WorkerId, int], int] = {}  # (worker, pid) -> pidfd, or -1 if there is none
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="queue-reaper", daemon=True)
        self._thread.start()

    def raise_error(self) -> None:
        """Raise the error that ended the thread, if there was one: without the thread no job is recovered."""
        if self._error is not None:
            raise QueueError(f"The thread that recovers jobs of dead workers ended: {self._error}") from self._error

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._watch.close()
        os.close(self._stop)

    def _run(self) -> None:
        try:
            while self._wait_for_a_death():
                if self._recover():
                    self._notify()
        except Exception as error:  # noqa: BLE001 - a thread has no caller: kept and raised in the main thread
            self._error = error
            self._notify()
        finally:
            for pidfd in self._pidfds.values():
                _close(pidfd)

    def _wait_for_a_death(self) -> bool:
        """Return True when jobs of a dead worker may be there, False when this thread shall end."""
        if self._follow({(worker.id, worker.pid) for worker in live_workers(self._root)}):
            return True
        pidfds = [pidfd for pidfd in self._pidfds.values() if pidfd >= 0]
        probing = len(pidfds) < len(self._pidfds)
        woken = self._watch.wait(PROBE_S if probing else LOOK_S, also=[self._stop, *pidfds])
        if self._stop in woken.ready:
            return False
        if woken.ready:
            self._notify()
        return True

    def _follow(self, workers: set[tuple[WorkerId, int]]) -> bool:
        """Have a pidfd for exactly these workers. True if one is gone that was there before."""
        gone = self._pidfds.keys() - workers
        for worker in gone:
            _close(self._pidfds.pop(worker))
        for worker in workers - self._pidfds.keys():
            self._pidfds[worker] = _open_pidfd(worker[1])
        return bool(gone)


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:  # already dead, in another pid namespace, or forbidden: its lock is probed instead
        return -1


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
