"""One lock says whether the server lives; its note says which run it serves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from queue_samples import RUN, make_job, names

from async_grpo.errors import DiskFullError, QueueError
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.rundir.locks import KernelLock, server_alive, server_lock


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[KernelLock]:
    """The lock of a queue as a server holds it that has just started, or that of the next one of `server`."""
    (tmp_path / "q").mkdir(mode=0o700, exist_ok=True)
    with server_lock(tmp_path / "q") as lock:
        yield lock


def start_loading(lock: KernelLock) -> None:
    assert lock.try_acquire({"role": "parameter server"})


def test_a_server_lives_from_its_start_and_serves_from_its_first_job(loading: KernelLock) -> None:
    start_loading(loading)
    root = loading.path.parent
    with closing(WorkerQueue.open(root, 1, "cpu")) as worker:
        assert (server_alive(root), worker.served()) == (True, False)
        with closing(ServerQueue.open(root, RUN, watch_workers=False, lock=loading)) as server:
            assert not worker.served()
            server.submit(make_job(0))
            assert worker.served()
        assert server_alive(root), "the lock is its owner's to release"
        loading.release()
        assert (server_alive(root), worker.served()) == (False, False)


def test_a_new_server_does_not_serve_by_the_note_of_a_dead_one(
    server: ServerQueue, worker: WorkerQueue, loading: KernelLock
) -> None:
    server.submit(make_job(0))
    server.close()
    assert loading.last_owner()["run_id"] == RUN
    start_loading(loading)
    assert not worker.served()


def test_a_worker_remembers_the_run_while_the_next_server_loads(tmp_path: Path, loading: KernelLock) -> None:
    server = ServerQueue.open(tmp_path / "q", RUN, max_attempts=1, watch_workers=False)
    server.submit(make_job(0))
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker:
        server.close()
        start_loading(loading)
        worker.fail(worker.claim(1)[0], "no reward")
        assert names(server, "quarantine"), "the server that issued it allowed one attempt"


@pytest.mark.parametrize(
    "lie",
    ['"max_attempts": "many"', '"max_attempts": null', '"max_attempts": 0', '"max_attempts": {}', '"run_id": [1]'],
)
def test_a_note_of_the_server_that_is_not_sound_tells_a_worker_nothing(tmp_path: Path, lie: str) -> None:
    server = ServerQueue.open(tmp_path / "q", RUN, max_attempts=1, watch_workers=False)
    server.submit(make_job(0))
    server.submit(make_job(1))
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker:
        server.close()
        server_lock(server.root).path.write_text(f'{{"run_id": "other", {lie}}}')
        [claim] = worker.claim(1)
        worker.fail(claim, "no reward")
        assert names(server, "quarantine"), "what the server said before is still good"
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker:  # and this one was told nothing
        assert [claim.job.seq for claim in worker.claim(1)] == [1]


def test_a_job_is_issued_only_once_workers_can_know_its_run(
    server: ServerQueue, worker: WorkerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "no room")))
        with pytest.raises(DiskFullError, match=r"server\.lock"):
            server.submit(make_job(0))
    assert (server.open_jobs, names(server)) == (0, [])
    server.submit(make_job(0))
    assert worker.served()
    assert len(worker.claim(1)) == 1


@pytest.mark.parametrize("next_call", ["finished", "submit"])
def test_a_server_ends_when_its_lock_was_deleted(server: ServerQueue, next_call: str) -> None:
    """A second one could start by now."""
    server_lock(server.root).path.unlink()
    with pytest.raises(QueueError, match=r"server\.lock was deleted or replaced while in use"):
        server.finished() if next_call == "finished" else server.submit(make_job(0))
    assert names(server) == []
