"""What becomes of jobs when a worker or the server dies and another takes its place; and the archive kept for that."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from queue_samples import RUN, die, fail_for_good, make_job, names, reopened, serve, submit, take_all

from async_grpo.errors import DiskFullError, QueueError
from async_grpo.queue import ServerQueue, WorkerQueue, filesystem, retry_given_up
from async_grpo.rundir.locks import KernelLock, server_alive, server_lock


@pytest.mark.parametrize("order", ["server first", "worker first", "while the server loads"])
def test_deaths_while_the_run_was_down_cost_no_attempt(server: ServerQueue, worker: WorkerQueue, order: str) -> None:
    server.submit(make_job(0))
    worker.claim(1)
    server.close()
    die(worker)
    loading = server_lock(server.root)
    if order == "while the server loads":
        assert loading.try_acquire({"role": "parameter server"})
    if order != "server first":
        WorkerQueue.open(server.root, 1, "cpu").close()
        assert names(server) == ["0000000000.a00_pending.safetensors"]
    loading.release()
    with reopened(server) as second:
        second.submit(make_job(0))
        assert names(second) == ["0000000000.a00_pending.safetensors"]


def test_a_resumed_run_tries_a_given_up_job_once_more(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    fail_for_good(worker)
    with reopened(server) as second:
        second.submit(make_job(0))
        assert names(second) == ["0000000000.a03_pending.safetensors"]
        assert names(second, "quarantine") == ["0000000000.a02_retried.reason", "0000000000.a02_retried.safetensors"]
        assert not retry_given_up(second.root, 0)  # it is not given up any more
        assert second.counts().quarantined == 0


def test_only_checkpointed_groups_are_trimmed(server: ServerQueue, worker: WorkerQueue) -> None:
    submit(server, *range(6))
    serve(worker)
    take_all(server)
    assert server.trim_done(1, consumed={0, 1, 2}) == 3
    assert [int(name[:10]) for name in names(server, "done")] == [3, 4, 5]
    assert server.trim_done(1, consumed=range(6)) == 2
    assert [int(name[:10]) for name in names(server, "done")] == [5]


def test_the_server_notices_that_workers_find_no_room(
    server: ServerQueue, worker: WorkerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.submit(make_job(0))
    serve(worker)
    take_all(server)
    [kept] = (server.root / "done").rglob("*.safetensors")
    size = kept.stat().st_size

    def is_short(queue: ServerQueue, free: int) -> bool:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
        return queue.short_of_room()

    assert (is_short(server, size), is_short(server, size - 1)) == (False, True)
    with reopened(server, consumed={0}) as second:
        assert is_short(second, size - 1)
    kept.unlink()
    with reopened(second, consumed={0}) as third:
        assert not is_short(third, 1)


def test_the_archive_is_listed_once_by_each_server(tmp_path: Path) -> None:
    root, listed = tmp_path / "q", []
    filesystem.prepare_root(root)

    class CountedFiles(filesystem.OsFiles):
        def names(self, folder: str) -> list[str]:
            listed.append(folder)
            return super().names(folder)

    for consumed, seqs in (((), range(4)), (range(4), range(1004, 1008))):
        files = CountedFiles(root)
        with closing(ServerQueue.open(root, RUN, consumed=consumed, watch_workers=False, files=files)) as server:
            listed.clear()
            submit(server, *seqs)
            with closing(WorkerQueue.open(root, 1, "cpu")) as worker:
                serve(worker)
            take_all(server)
            server.trim_done(3, consumed=range(2000))
            assert not [folder for folder in listed if folder.startswith("done")]
    assert [int(name[:10]) for name in names(server, "done")] == [1005, 1006, 1007]


def test_a_broken_job_that_finds_no_room_does_not_hold_up_the_others(
    server: ServerQueue, worker: WorkerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.submit(make_job(0))
    (server.root / "queue" / "0000000000.a00_pending.safetensors").write_bytes(b"junk")
    server.submit(make_job(1))
    serve(worker)
    with monkeypatch.context() as full:
        full.setattr(server._moves.files, "create", Mock(side_effect=OSError(errno.ENOSPC, "no room")))
        assert [entry.seq for entry in server.finished()] == [1]
    assert server.healing.broken == 0
    assert take_all(server) == [1]
    assert names(server) == ["0000000000.a01_pending.safetensors"]


def test_a_server_starts_whatever_a_person_put_among_its_files(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path
) -> None:
    server.submit(make_job(0))
    pending = server.root / "queue" / "0000000000.a00_pending.safetensors"
    pending.unlink()
    pending.mkdir()
    (server.root / "done" / "7").write_text("notes")
    (server.root / "done" / "0000000").symlink_to(tmp_path)
    with reopened(server) as second:
        second.submit(make_job(0))
        assert worker.claim(1) == []
        assert second.finished() == []
        assert names(second) == ["0000000000.a01_pending.safetensors"]
        assert (second.root / "quarantine" / "0000000000.a00_broken_processing_by_dev1.safetensors").is_dir()


def test_who_tidies_up_in_a_live_run_breaks_nothing(server: ServerQueue, worker: WorkerQueue) -> None:
    for seq in range(3):
        server.submit(make_job(seq))
        shutil.rmtree(server.root / "done")
        (server.root / "done").mkdir(mode=0o700)
        serve(worker)
        assert take_all(server) == [seq]


# --- One lock says whether the server lives; its note says which run it serves -----------------------------------


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
    submit(server, 0, 1)
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
