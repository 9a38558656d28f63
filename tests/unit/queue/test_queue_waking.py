"""Locks, watches, waits and the pipe: who holds what, what wakes whom, and everything that may be wrong with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from queue_samples import RUN, answer, make_job, seqs, submit

from async_grpo.queue import ServerQueue, WorkerQueue, liveness, wakeups
from async_grpo.queue import worker as queue_worker
from async_grpo.queue.names import BROKEN, PENDING, JobName
from async_grpo.queue.wakeups import EVERYTHING, IN_MOVED_TO, DirectoryWatch, JobPipe
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


@pytest.mark.parametrize("blind", [False, True], ids=["inotify", "blind"])
def test_the_server_wakes_for_a_result(server: ServerQueue, monkeypatch: pytest.MonkeyPatch, blind: bool) -> None:
    if blind:
        monkeypatch.setattr(wakeups, "_inotify", lambda masks: -1)
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


# --- The pipe that tells one idle worker of a new job, and everything that may be wrong with it ------------------

LONG_S = 600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.fixture
def only_the_pipe_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_worker, "LOOK_S", LONG_S)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@contextmanager
def woken(worker: WorkerQueue) -> Iterator[None]:
    """What is done meanwhile wakes the worker, which then gets job 0."""
    sleeper = in_thread(lambda: worker.wait(LONG_S))
    yield
    sleeper.join(60)
    assert not sleeper.is_alive()
    assert seqs(worker.claim(1)) == [0]


def test_names_are_taken_once_and_in_the_order_of_telling(root: Path) -> None:
    with closing(JobPipe(root)) as writer, closing(JobPipe(root)) as reader:
        assert reader.take(9) == []
        writer.announce(["0000000002.a00"])
        writer.announce(["0000000001.a100", "0000000003.a00"])
        assert reader.take(9) == ["0000000002.a00", "0000000001.a100", "0000000003.a00"]
        assert writer.take(9) == []


def test_each_name_wakes_a_sleeper_and_goes_to_one(root: Path) -> None:
    taken: list[str] = []
    woken = threading.Semaphore(0)

    def sleeper() -> None:
        with closing(JobPipe(root)) as pipe:
            while not (names := pipe.take(9)):
                pipe.wait(LONG_S)
            taken.extend(names)
            woken.release()

    sleepers = [in_thread(sleeper) for _ in range(4)]
    with closing(JobPipe(root)) as writer:
        for number in range(4):
            writer.announce([f"{number:010d}.a00"])
            assert woken.acquire(timeout=60)
            assert len(taken) == number + 1
        for thread in sleepers:
            thread.join(60)
    assert sorted(taken) == [f"{number:010d}.a00" for number in range(4)]


def test_a_full_pipe_is_told_no_more(root: Path) -> None:
    with closing(JobPipe(root)) as pipe:
        for _ in range(100):
            pipe.announce(["0000000000.a00"] * 256)
        assert len(pipe.take(9)) == 9
        assert len(pipe.take(EVERYTHING)) == 4096 - 9
        assert pipe.take(9) == []


@pytest.mark.parametrize("obstacle", ["a file", "a link", "no folder"])
def test_without_a_pipe_everybody_looks_for_himself(root: Path, obstacle: str) -> None:
    if obstacle == "a file":
        (root / "tmp" / "jobs.pipe").write_text("not a pipe")
    elif obstacle == "a link":
        os.mkfifo(root / "elsewhere")
        (root / "tmp" / "jobs.pipe").symlink_to(root / "elsewhere")
    else:
        (root / "tmp").rmdir()
    with closing(JobPipe(root)) as pipe:
        pipe.announce(["0000000000.a00"])
        assert pipe.take(9) == []
        assert not pipe.wait(LONG_S)


def test_a_pipe_that_was_deleted_is_made_again(root: Path) -> None:
    with closing(JobPipe(root)) as writer, closing(JobPipe(root)) as reader:
        (root / "tmp" / "jobs.pipe").unlink()
        writer.announce(["0000000000.a00"])
        assert reader.wait(60)
        assert reader.take(9) == ["0000000000.a00"]


@pytest.mark.usefixtures("only_the_pipe_wakes")
def test_a_sleeping_worker_is_woken_by_a_new_job(server: ServerQueue) -> None:
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker, woken(worker):
        server.submit(make_job(0))


@pytest.mark.usefixtures("only_the_pipe_wakes")
@pytest.mark.parametrize("how", ["fails", "hands back", "is killed"])
def test_a_sleeping_worker_is_woken_by_a_job_that_another_had(server: ServerQueue, how: str) -> None:
    server.submit(make_job(0))
    other = WorkerQueue.open(server.root, 2, "cpu")
    [claim] = other.claim(1)
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker:
        assert worker.claim(1) == []
        with woken(worker):
            if how == "fails":
                other.fail(claim, "it failed")
            elif how == "hands back":
                other.hand_back(claim)
            other._lock.release()  # as the kernel does when a process is killed; the server sees it within a second


@pytest.mark.usefixtures("only_the_pipe_wakes")
def test_who_takes_one_of_several_jobs_leaves_the_others_to_sleepers(server: ServerQueue) -> None:
    with (
        closing(WorkerQueue.open(server.root, 1, "cpu")) as first,
        closing(WorkerQueue.open(server.root, 2, "cpu")) as second,
    ):
        assert second.claim(1) == []
        submit(server, 0, 1, 2)
        assert seqs(first.claim(1)) == [0]
        assert second.wait(60)
        assert seqs(second.claim(9)) == [1, 2]


def test_an_older_job_goes_first_once_the_directory_is_looked_at(server: ServerQueue, worker: WorkerQueue) -> None:
    submit(server, *range(4))
    [oldest] = worker.claim(1)
    worker.hand_back(oldest)
    worker._look_at = 0.0  # which is so after 50 ms
    assert seqs(worker.claim(2)) == [0, 1]


def test_only_what_is_in_the_queue_is_announced(server: ServerQueue) -> None:
    server.submit(make_job(0))
    assert server._pipe.take(EVERYTHING) == ["0000000000.a00"]
    assert server._moves.set_aside(JobName(0, 0, PENDING), BROKEN, "it is broken")
    assert server._pipe.take(EVERYTHING) == []
