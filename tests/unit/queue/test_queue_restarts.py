"""What becomes of jobs when a worker or the server dies and another takes its place; and the archive kept for that."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from queue_samples import RUN, answer, die, die_as_server, make_job, names, serve, take_all

from async_grpo.errors import DiskFullError
from async_grpo.queue import ServerQueue, WorkerQueue, filesystem, retry_given_up


def no_room(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_jobs_of_a_dead_worker_are_pending_again_and_of_a_live_one_never(server: ServerQueue) -> None:
    dead, live = (WorkerQueue.open(server.root, number, "cpu") for number in (1, 2))
    for seq in range(2):
        server.submit(make_job(seq))
    dead.claim(1)
    live.claim(1)
    die(dead)
    assert server.recover_dead() == [0]
    assert names(server) == [
        "0000000000.a01_pending.safetensors",
        "0000000001.a00_processing_by_dev2.safetensors",
    ]
    live.close()


def test_a_job_that_kills_its_worker_is_given_up_at_the_third_time_and_costs_no_other(server: ServerQueue) -> None:
    for seq in range(3):
        server.submit(make_job(seq))
    for claimed in ([0, 1, 2], [0], [0]):
        worker = WorkerQueue.open(server.root, 1, "cpu")
        assert [claim.job.seq for claim in worker.claim(9)] == claimed
        die(worker)
        server.recover_dead()
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker:
        for _ in range(2):
            worker._look_at = 0.0
            serve(worker)
    assert take_all(server) == [1, 2]
    assert server.given_up.keys() == {0}


def test_a_restarted_worker_frees_its_own_leftovers_first(server: ServerQueue) -> None:
    first = WorkerQueue.open(server.root, 1, "cpu")
    server.submit(make_job(0))
    (server.root / "tmp" / "dev1" / "77.0").write_bytes(b"half")
    first.claim(1)
    die(first)
    with closing(WorkerQueue.open(server.root, 1, "cpu")):
        assert names(server) == ["0000000000.a01_pending.safetensors"]
        assert names(server, "tmp/dev1") == []


def test_a_worker_that_died_between_result_and_claim_leaves_the_result(server: ServerQueue) -> None:
    worker = WorkerQueue.open(server.root, 1, "cpu")
    server.submit(make_job(0))
    [claim] = worker.claim(1)
    claimed = (server.root / "queue" / str(claim.name)).read_bytes()
    worker.complete(claim, answer(claim))
    (server.root / "queue" / str(claim.name)).write_bytes(claimed)
    for _ in range(2):  # before and after the server took it
        die(worker)
        assert server.recover_dead() == []
        assert not any("pending" in name or "processing" in name for name in names(server))
        take_all(server)
        (server.root / "queue" / str(claim.name)).write_bytes(claimed)
    assert server.healing.duplicates == 0


def test_what_the_checkpoint_does_not_know_is_given_back(tmp_path: Path) -> None:
    root = tmp_path / "q"
    first = ServerQueue.open(root, RUN, watch_workers=False)
    worker = WorkerQueue.open(root, 1, "cpu")
    for seq in range(6):
        first.submit(make_job(seq))
    serve(worker, 4)
    taken = [first.take(entry) for entry in first.finished()[:3]]
    assert [group.job.seq for group in taken if group] == [0, 1, 2]
    die_as_server(first)
    with closing(ServerQueue.open(root, RUN, consumed={0, 1}, watch_workers=False)) as second:
        for seq in range(2, 6):
            second.submit(make_job(seq))
        finished = second.finished()
        assert [entry.seq for entry in finished] == [2, 3]  # given back from done/, adopted in queue/
        assert second.counts() == (2, 0, 2, 0)
        assert [group.job.seq for entry in finished if (group := second.take(entry))] == [2, 3]
        assert second.healing == type(second.healing)()
    worker.close()


def test_a_restarted_server_adopts_claims_of_live_workers(tmp_path: Path) -> None:
    first = ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)
    worker = WorkerQueue.open(first.root, 1, "cpu")
    first.submit(make_job(0))
    [claim] = worker.claim(1)
    die_as_server(first)
    with closing(ServerQueue.open(first.root, RUN, watch_workers=False)) as second:
        second.submit(make_job(0))
        assert second.counts() == (0, 1, 0, 0)
        worker.complete(claim, answer(claim))
        assert take_all(second) == [0]
        assert second.healing == type(second.healing)()
    worker.close()


def test_deaths_while_the_run_was_down_cost_no_attempt(tmp_path: Path) -> None:
    for order in ("server first", "worker first"):
        root = tmp_path / order
        first = ServerQueue.open(root, RUN, watch_workers=False)
        worker = WorkerQueue.open(root, 1, "cpu")
        first.submit(make_job(0))
        worker.claim(1)
        die_as_server(first)
        die(worker)
        if order == "worker first":
            WorkerQueue.open(root, 1, "cpu").close()
        with closing(ServerQueue.open(root, RUN, watch_workers=False)) as second:
            second.submit(make_job(0))
            assert names(second) == ["0000000000.a00_pending.safetensors"]


def test_attempts_outlive_the_server(tmp_path: Path) -> None:
    first = ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)
    worker = WorkerQueue.open(first.root, 1, "cpu")
    first.submit(make_job(0))
    worker.fail(worker.claim(1)[0], "no")
    die_as_server(first)
    with closing(ServerQueue.open(first.root, RUN, watch_workers=False)) as second:
        second.submit(make_job(0))
        assert names(second) == ["0000000000.a01_pending.safetensors"]
    worker.close()


def test_a_resumed_run_tries_a_given_up_job_once_more(tmp_path: Path) -> None:
    first = ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)
    worker = WorkerQueue.open(first.root, 1, "cpu")
    first.submit(make_job(0))
    for _ in range(3):
        worker._look_at = 0.0
        worker.fail(worker.claim(1)[0], "no")
    die_as_server(first)
    with closing(ServerQueue.open(first.root, RUN, watch_workers=False)) as second:
        second.submit(make_job(0))
        assert names(second) == ["0000000000.a03_pending.safetensors"]
        assert names(second, "quarantine") == ["0000000000.a02_retried.reason", "0000000000.a02_retried.safetensors"]
        assert not retry_given_up(second.root, 0)  # it is not given up any more
        assert second.counts().quarantined == 0
    worker.close()


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
    assert take_all(server) == [0]
    [kept] = (server.root / "done").rglob("*.safetensors")
    for free, short in ((kept.stat().st_size, False), (kept.stat().st_size - 1, True)):
        monkeypatch.setattr(os, "statvfs", lambda path, free=free: SimpleNamespace(f_bavail=free, f_frsize=1))
        assert server.short_of_room() is short


def test_a_resumed_server_knows_how_much_room_a_group_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)
    worker = WorkerQueue.open(first.root, 1, "cpu")
    first.submit(make_job(0))
    serve(worker)
    assert take_all(first) == [0]
    die_as_server(first)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=1))
    with closing(ServerQueue.open(first.root, RUN, consumed={0}, watch_workers=False)) as second:
        assert second.short_of_room() is True
    (path,) = (first.root / "done").rglob("*.safetensors")
    path.unlink()
    with closing(ServerQueue.open(first.root, RUN, consumed={0}, watch_workers=False)) as second:
        assert second.short_of_room() is False
    worker.close()


def test_a_job_that_found_no_room_keeps_its_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)
    worker = WorkerQueue.open(first.root, 1, "cpu")
    first.submit(make_job(0))
    worker.fail(worker.claim(1)[0], "ValueError")
    die_as_server(first)
    with closing(ServerQueue.open(first.root, RUN, watch_workers=False)) as second:
        with monkeypatch.context() as full:
            full.setattr(second._moves.files, "create", no_room)
            with pytest.raises(DiskFullError):
                second.submit(make_job(0))
        second.submit(make_job(0))
        assert names(second) == ["0000000000.a01_pending.safetensors"]
    worker.close()


class CountedFiles(filesystem.OsFiles):
    """Says which folders of the archive were listed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed: list[str] = []

    def names(self, folder: str) -> list[str]:
        self.listed += [folder] if folder.startswith("done") else []
        return super().names(folder)


def test_the_archive_is_listed_once_by_each_server(tmp_path: Path) -> None:
    filesystem.prepare_root(tmp_path / "q")
    for consumed, seqs in (((), range(4)), (range(4), range(1004, 1008))):
        files = CountedFiles(tmp_path / "q")
        with closing(
            ServerQueue.open(tmp_path / "q", RUN, consumed=consumed, watch_workers=False, files=files)
        ) as server:
            files.listed.clear()
            with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker:
                for seq in seqs:
                    server.submit(make_job(seq))
                serve(worker)
            take_all(server)
            server.trim_done(3, consumed=range(2000))
            assert files.listed == []
    assert [int(name[:10]) for name in names(server, "done")] == [1005, 1006, 1007]


def test_a_group_that_finds_no_room_on_its_way_back_is_given_back_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)
    worker = WorkerQueue.open(first.root, 1, "cpu")
    first.submit(make_job(0))
    serve(worker)
    assert take_all(first) == [0]
    die_as_server(first)
    with closing(ServerQueue.open(first.root, RUN, watch_workers=False)) as second:
        with monkeypatch.context() as full:
            full.setattr(second._moves.files, "rename", no_room)
            with pytest.raises(DiskFullError):
                second.submit(make_job(0))
        second.submit(make_job(0))
        assert names(second) == ["0000000000.a00_complete_from_dev1.safetensors"]
        assert (take_all(second), second.trim_done(0, consumed={0})) == ([0], 1)
    worker.close()


@pytest.mark.parametrize("operation", ["make_folder", "rename"])
def test_a_group_that_finds_no_room_in_the_archive_stays_in_the_queue(
    server: ServerQueue, worker: WorkerQueue, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    server.submit(make_job(0))
    serve(worker)
    [entry] = server.finished()
    with monkeypatch.context() as full:
        full.setattr(server._moves.files, operation, no_room)
        with pytest.raises(DiskFullError):
            server.take(entry)
    assert take_all(server) == [0]


def test_a_broken_job_that_finds_no_room_does_not_hold_up_the_others(
    server: ServerQueue, worker: WorkerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.submit(make_job(0))
    (server.root / "queue" / "0000000000.a00_pending.safetensors").write_bytes(b"junk")
    server.submit(make_job(1))
    serve(worker)
    with monkeypatch.context() as full:
        full.setattr(server._moves.files, "create", no_room)
        assert [entry.seq for entry in server.finished()] == [1]
    assert server.healing.broken == 0
    assert take_all(server) == [1]
    assert names(server) == ["0000000000.a01_pending.safetensors"]


def test_a_server_starts_whatever_a_person_put_among_its_files(tmp_path: Path) -> None:
    first = ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)
    first.submit(make_job(0))
    first.close()
    pending = first.root / "queue" / "0000000000.a00_pending.safetensors"
    pending.unlink()
    pending.mkdir()
    (first.root / "done" / "7").write_text("notes")
    (first.root / "done" / "0000000").symlink_to(tmp_path)
    with (
        closing(ServerQueue.open(first.root, RUN, watch_workers=False)) as second,
        closing(WorkerQueue.open(first.root, 1, "cpu")) as worker,
    ):
        second.submit(make_job(0))
        assert worker.claim(1) == []
        assert second.finished() == []
        assert names(second) == ["0000000000.a01_pending.safetensors"]
        assert (second.root / "quarantine" / "0000000000.a00_broken_processing_by_dev1.safetensors").is_dir()
