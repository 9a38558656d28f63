"""One lock says whether the server lives; its note says which run it serves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from queue_samples import RUN, make_job

from async_grpo.errors import DiskFullError, QueueError
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.rundir.locks import KernelLock, server_alive, server_lock

HOLD = """
import sys
from pathlib import Path
from async_grpo.rundir.locks import server_lock
assert server_lock(Path(sys.argv[1])).try_acquire({"role": "parameter server"})
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "q").mkdir(mode=0o700)
    return tmp_path / "q"


@pytest.fixture
def loading(root: Path) -> Iterator[KernelLock]:
    """The lock as a server holds it that has just started."""
    lock = server_lock(root)
    assert lock.try_acquire({"role": "parameter server"})
    yield lock
    lock.release()


def names(root: Path, folder: str) -> list[str]:
    return [path.name for path in (root / folder).iterdir()]


def died_with_a_job(root: Path) -> None:
    """Worker 1 claims job 0 and dies; then the server dies."""
    server = ServerQueue.open(root, RUN, watch_workers=False)
    worker = WorkerQueue.open(root, 1, "cpu")
    server.submit(make_job(0))
    assert worker.claim(1)
    worker._lock.release()
    server.close()


def test_a_server_lives_from_its_start_and_serves_from_its_first_job(root: Path, loading: KernelLock) -> None:
    with closing(WorkerQueue.open(root, 1, "cpu")) as worker:
        assert (server_alive(root), worker.served()) == (True, False)
        with closing(ServerQueue.open(root, RUN, watch_workers=False, lock=loading)) as server:
            assert not worker.served()
            server.submit(make_job(0))
            assert worker.served()
        assert server_alive(root), "the lock is its owner's to release"
        loading.release()
        assert (server_alive(root), worker.served()) == (False, False)


def test_a_new_server_does_not_serve_by_the_note_of_a_dead_one(root: Path) -> None:
    died_with_a_job(root)
    with closing(WorkerQueue.open(root, 2, "cpu")) as worker:
        assert server_lock(root).last_owner()["run_id"] == RUN
        lock = server_lock(root)
        assert lock.try_acquire({"role": "parameter server"})
        assert not worker.served()
        lock.release()


def test_the_death_of_a_worker_costs_no_attempt_while_the_next_server_loads(root: Path) -> None:
    died_with_a_job(root)
    lock = server_lock(root)
    assert lock.try_acquire({"role": "parameter server"})
    WorkerQueue.open(root, 1, "cpu").close()
    assert names(root, "queue") == ["0000000000.a00_pending.safetensors"]
    lock.release()


def test_a_worker_remembers_the_run_while_the_next_server_loads(root: Path) -> None:
    server = ServerQueue.open(root, RUN, max_attempts=1, watch_workers=False)
    for seq in range(2):
        server.submit(make_job(seq))
    with closing(WorkerQueue.open(root, 1, "cpu")) as worker:
        server.close()
        lock = server_lock(root)
        assert lock.try_acquire({"role": "parameter server"})
        claim = worker.claim(1)[0]
        worker.fail(claim, "no reward")
        assert names(root, "quarantine"), "the server that issued it allowed one attempt"
        lock.release()


@pytest.mark.parametrize(
    "lie",
    ['"max_attempts": "many"', '"max_attempts": null', '"max_attempts": 0', '"max_attempts": {}', '"run_id": [1]'],
)
def test_a_note_of_the_server_that_is_not_sound_tells_a_worker_nothing(root: Path, lie: str) -> None:
    with closing(ServerQueue.open(root, RUN, max_attempts=1, watch_workers=False)) as server:
        server.submit(make_job(0))
        server.submit(make_job(1))
        with closing(WorkerQueue.open(root, 1, "cpu")) as worker:
            server.close()
            server_lock(root).path.write_text(f'{{"run_id": "other", {lie}}}')
            [claim] = worker.claim(1)
            worker.fail(claim, "no reward")
            assert names(root, "quarantine"), "what the server said before is still good"
        with closing(WorkerQueue.open(root, 1, "cpu")) as worker:  # and this one was told nothing
            assert [claim.job.seq for claim in worker.claim(1)] == [1]


def test_a_job_is_issued_only_once_workers_can_know_its_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ServerQueue.open(root, RUN, watch_workers=False)) as server:
        with monkeypatch.context() as full:

            def no_room(*args: Any) -> int:
                raise OSError(errno.ENOSPC, "no room")

            full.setattr(os, "pwrite", no_room)
            with pytest.raises(DiskFullError, match=r"server\.lock"):
                server.submit(make_job(0))
        assert (server.open_jobs, names(root, "queue")) == (0, [])
        server.submit(make_job(0))
        with closing(WorkerQueue.open(root, 1, "cpu")) as worker:
            assert worker.served()
            assert len(worker.claim(1)) == 1


@pytest.mark.parametrize("next_call", ["finished", "submit"])
def test_a_server_ends_when_its_lock_was_deleted(root: Path, next_call: str) -> None:
    """A second one could start by now."""
    with closing(ServerQueue.open(root, RUN, watch_workers=False)) as server:
        server_lock(root).path.unlink()
        with pytest.raises(QueueError, match=r"server\.lock was deleted or replaced while in use"):
            server.finished() if next_call == "finished" else server.submit(make_job(0))
        assert names(root, "queue") == []
