"""The queue's directory: whose files it takes, who may use it, how much it holds, and what is on the disk when."""

from __future__ import annotations

import errno
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from queue_samples import RUN, answer, make_job, names, serve, submit, take_all

from async_grpo.errors import QueueError, RunDirError
from async_grpo.queue import ServerQueue, WorkerQueue, quarantined
from async_grpo.queue.codec import encode_job
from async_grpo.queue.filesystem import OsFiles
from async_grpo.queue.listing import queue_counts
from async_grpo.rundir import folders


def test_one_server_and_one_worker_of_a_number(server: ServerQueue, worker: WorkerQueue) -> None:
    with pytest.raises(RunDirError, match=f"process {os.getpid()}"):
        ServerQueue.open(server.root, RUN)
    with pytest.raises(QueueError, match=f"dev1 runs already: process {os.getpid()}"):
        WorkerQueue.open(server.root, 1, "cpu")
    assert [(state.name, state.pid) for state in server.workers()] == [("dev1", os.getpid())]


@pytest.mark.parametrize("number", [-1, 10_000])
def test_a_number_that_no_file_name_can_hold_is_refused(server: ServerQueue, number: int) -> None:
    server.submit(make_job(0))
    with pytest.raises(QueueError, match="from 0 to 9999"):
        WorkerQueue.open(server.root, number, "cpu")
    assert names(server, "alive") == []


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_result_is_on_the_disk_before_its_claim_is_dropped(
    server: ServerQueue, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str, method: Any) -> Any:
        def does(files: OsFiles, *given: Any) -> None:
            method(files, *given)
            done.append(" ".join([name, *(path.partition("/")[0] for path in given if isinstance(path, str))]))

        return does

    for name in ("create", "rename", "sync", "unlink"):
        monkeypatch.setattr(OsFiles, name, noted(name, getattr(OsFiles, name)))
    server.submit(make_job(0))
    with closing(WorkerQueue.open(server.root, 1, "cpu", durable=durable)) as worker:
        [claim] = worker.claim(1)
        done.clear()
        worker.complete(claim, answer(claim))
        expected = ["create tmp", "sync tmp", "rename tmp queue", "sync queue", "unlink queue"]
        assert done == [each for each in expected if durable or "sync" not in each]


def test_the_number_of_open_jobs_is_bounded(tmp_path: Path) -> None:
    with closing(ServerQueue.open(tmp_path / "q", RUN, max_open=1, watch_workers=False)) as server:
        server.submit(make_job(0))
        with pytest.raises(QueueError, match="bound"):
            server.submit(make_job(1))


def test_files_that_are_not_ours_are_left_alone(server: ServerQueue, worker: WorkerQueue) -> None:
    pending = "0000000000.a00_pending.safetensors"
    odd = ["notes.txt", f"{pending}.bak", f"x{pending}", "1_pending"]
    for name in odd:
        (server.root / "queue" / name).write_text("mine")
    assert server.finished() == []
    assert worker.claim(9) == []
    assert names(server) == sorted(odd)


def test_links_pipes_and_folders_are_refused_without_following_or_waiting(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(encode_job(make_job(0)))
    (server.root / "queue" / "0000000000.a00_pending.safetensors").symlink_to(tmp_path / "secret")
    os.mkfifo(server.root / "queue" / "0000000001.a00_pending.safetensors")
    (server.root / "queue" / "0000000002.a00_pending.safetensors").mkdir()
    assert worker.claim(9) == []
    assert [aside.seq for aside in quarantined(server.root)] == [0, 1, 2]
    assert (tmp_path / "secret").exists()


def test_a_job_of_another_run_is_refused(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    path = server.root / "queue" / "0000000000.a00_pending.safetensors"
    path.write_bytes(encode_job(make_job(0, run_id="other")))
    assert worker.claim(1) == []
    assert "run 'other'" in quarantined(server.root)[0].reason


def test_everything_is_private(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    serve(worker)
    take_all(server)
    paths = [server.root, *server.root.rglob("*")]
    assert {oct(path.stat().st_mode & 0o777) for path in paths} == {"0o700", "0o600"}


def test_counts_can_be_read_by_anyone(server: ServerQueue, worker: WorkerQueue) -> None:
    submit(server, 0, 1, 2)
    worker.claim(1)
    assert queue_counts(server.root) == (2, 1, 0, 0)
    assert (worker.pending(), server.unclaimed(), worker.alive_workers()) == (2, [1, 2], 1)


def test_a_forked_child_cannot_use_the_queue_of_its_parent(worker: WorkerQueue) -> None:
    child = os.fork()
    if child == 0:
        try:
            worker.claim(1)
        except QueueError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert worker._lock.held_here


def test_a_worker_notices_that_its_lock_file_was_deleted(worker: WorkerQueue) -> None:
    worker._lock.path.unlink()
    with pytest.raises(QueueError, match="deleted or replaced"):
        worker.claim(1)


def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir(mode=0o700)
    (tmp_path / "q" / "queue").symlink_to(tmp_path)
    with pytest.raises(RunDirError):
        ServerQueue.open(tmp_path / "q", RUN)


def test_nfs_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders.network_file_system(tmp_path) is None
    monkeypatch.setattr(folders, "network_file_system", lambda path: "NFS")
    with pytest.raises(RunDirError, match="NFS a rename may report a failure"):
        ServerQueue.open(tmp_path / "q", RUN)
    assert 0x6969 in folders._NETWORK_FILE_SYSTEMS


def test_a_folder_on_another_disk_is_named(
    server: ServerQueue, worker: WorkerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a link that someone set in done/ to save room: a file cannot be renamed to there."""
    server.submit(make_job(0))
    serve(worker)
    monkeypatch.setattr(server._moves.files, "rename", Mock(side_effect=OSError(errno.EXDEV, "cross-device link")))
    with pytest.raises(QueueError, match=r"done/0000000/.* is not on the disk that the queue is on"):
        take_all(server)
    assert names(server) == ["0000000000.a00_complete_from_dev1.safetensors"], "the group is still there"


def test_every_test_that_the_page_names_exists() -> None:
    root = Path(__file__).parents[3]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "queue.md").read_text()))
    sources = [path.read_text() for path in (root / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"def (test_\w+)", source)}
    assert len(named) > 20
    assert not named - defined, named - defined
