"""Locks, watches and waits: who holds what, and what wakes whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from queue_samples import RUN, answer, make_job

from async_grpo.queue import ServerQueue, WorkerQueue, liveness, wakeups
from async_grpo.queue.wakeups import IN_MOVED_TO, DirectoryWatch
from async_grpo.rundir.locks import KernelLock, describe_holder
from kit.waiting import DEADLINE_S, until

HOLDER = """
import sys, time
from async_grpo.rundir.locks import KernelLock
assert KernelLock(sys.argv[1]).try_acquire({"role": "test"})
print("held", flush=True)
time.sleep(60)
"""
WORKER = """
import sys, time
from async_grpo.queue import WorkerQueue
queue = WorkerQueue.open(sys.argv[1], int(sys.argv[2]), "cpu")
print(len(queue.claim(1)), flush=True)
time.sleep(60)
"""


def run(code: str, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(params=["inotify", "blind"])
def watching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "blind":
        monkeypatch.setattr(wakeups, "_inotify", lambda masks: -1)
    return str(request.param)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerQueue]:
    with closing(ServerQueue.open(tmp_path / "q", RUN)) as queue:
        yield queue


def test_a_lock_names_its_holder_and_is_free_when_that_is_killed(tmp_path: Path) -> None:
    lock = KernelLock(tmp_path / "x.lock")
    assert lock.holder() is None
    process = run(HOLDER, lock.path)
    holder = lock.holder()
    assert holder is not None
    assert (holder["pid"], holder["role"]) == (process.pid, "test")
    assert f"process {process.pid} on host" in describe_holder(holder)
    assert not lock.try_acquire()
    kill(process)
    assert not lock.is_held()
    assert lock.last_owner()["role"] == "test"
    assert lock.try_acquire({})
    lock.release()


def test_looking_at_a_lock_of_this_process_does_not_lose_it(tmp_path: Path) -> None:
    mine, again = KernelLock(tmp_path / "x.lock"), KernelLock(tmp_path / "x.lock")
    assert mine.try_acquire({})
    assert not again.try_acquire()
    assert again.is_held()
    assert again.last_owner()["pid"] == os.getpid()
    code = "import sys\nfrom async_grpo.rundir.locks import KernelLock\nprint(KernelLock(sys.argv[1]).holder()['pid'])"
    told = subprocess.run([sys.executable, "-c", code, mine.path], capture_output=True, text=True, check=True)
    assert int(told.stdout) == os.getpid()
    mine.release()


def test_a_watch_tells_names_and_keeps_them_between_waits(tmp_path: Path) -> None:
    with closing(DirectoryWatch({tmp_path: IN_MOVED_TO})) as watch:
        if watch.blind:
            pytest.skip("the kernel gives no inotify here")
        assert not watch.wait(0).names
        (tmp_path / "a").touch()
        (tmp_path / "a").rename(tmp_path / "b")
        assert watch.wait(DEADLINE_S).names == ["b"]


def test_a_watch_that_missed_something_says_so(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with closing(DirectoryWatch({tmp_path / "d": IN_MOVED_TO})) as watch:
        (tmp_path / "d").rename(tmp_path / "e")
        assert watch.wait(DEADLINE_S).look


def test_the_server_wakes_for_a_result(server: ServerQueue, watching: str) -> None:
    server.submit(make_job(0))
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker:

        def serve() -> None:
            [claim] = worker.claim(1)
            worker.complete(claim, answer(claim))

        late = threading.Timer(0.05, serve)
        late.start()
        until(lambda: server.wait(5) and server.finished())
        late.join()


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_killed_workers_job_is_pending_again_without_anyone_asking(
    server: ServerQueue, monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:
        monkeypatch.setattr(liveness, "_open_pidfd", lambda pid: -1)
    server.submit(make_job(0))
    process = run(WORKER, server.root, 1)
    assert server.counts().processing == 1
    assert [worker.pid for worker in server.workers()] == [process.pid]
    kill(process)
    until(lambda: server.counts().pending == 1)
    assert server.workers() == []
    until(lambda: server.wait(1))  # told of it


def test_a_stopped_worker_keeps_its_job(server: ServerQueue) -> None:
    server.submit(make_job(0))
    process = run(WORKER, server.root, 1)
    process.send_signal(signal.SIGSTOP)
    assert server.recover_dead() == []
    assert server.counts().processing == 1
    kill(process)
    until(lambda: server.counts().pending == 1)
