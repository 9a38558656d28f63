"""The pipe that tells one idle worker of a new job, and everything that may be wrong with it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from queue_samples import make_job, seqs, submit

from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.queue import worker as queue_worker
from async_grpo.queue.names import BROKEN, PENDING, JobName
from async_grpo.queue.wakeups import EVERYTHING, JobPipe

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
            other._lock.release()  # as the kernel does when a process is killed
            if how == "is killed":
                assert server.recover_dead() == [0]


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
