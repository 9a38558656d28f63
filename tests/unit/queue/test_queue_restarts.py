"""What becomes of jobs when a worker or the server dies and another takes its place; and the archive kept for that."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from queue_samples import RUN, die, fail_for_good, make_job, names, reopened, serve, take_all

from async_grpo.queue import ServerQueue, WorkerQueue, filesystem, retry_given_up
from async_grpo.rundir.locks import server_lock


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
    for seq in range(6):
        server.submit(make_job(seq))
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
            for seq in seqs:
                server.submit(make_job(seq))
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
