"""The protocol on one directory, with server and workers in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from queue_samples import RUN, answer, make_group, make_job, same_group

from async_grpo.errors import QueueError, RunDirError
from async_grpo.queue import ServerQueue, WorkerQueue, filesystem, quarantined, queue_counts, retry_given_up
from async_grpo.queue.codec import encode_job


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerQueue]:
    with closing(ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)) as queue:
        yield queue


@pytest.fixture
def worker(server: ServerQueue) -> Iterator[WorkerQueue]:
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as queue:
        yield queue


def names(server: ServerQueue, folder: str = "queue") -> list[str]:
    return sorted(path.name for path in (server.root / folder).rglob("*") if path.is_file())


def die(worker: WorkerQueue) -> None:
    """What the kernel does for a killed process: its lock is free, its claims stay."""
    worker._lock.release()


def serve(worker: WorkerQueue, limit: int = 8) -> None:
    for claim in worker.claim(limit):
        worker.complete(claim, answer(claim, worker.name))


def take_all(server: ServerQueue) -> list[int]:
    return [group.job.seq for entry in server.finished() if (group := server.take(entry))]


def test_the_life_of_a_job(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    assert names(server) == ["0000000000.a00_pending.safetensors"]
    [claim] = worker.claim(8)
    assert names(server) == ["0000000000.a00_processing_by_dev1.safetensors"]
    worker.complete(claim, answer(claim))
    assert names(server) == ["0000000000.a00_complete_from_dev1.safetensors"]
    [entry] = server.finished()
    group = server.take(entry)
    assert group is not None
    assert same_group(group, answer(claim))
    assert names(server) == []
    assert names(server, "done") == ["0000000000.a00_complete_from_dev1.safetensors"]
    assert server.open_jobs == 0
    assert server.counts() == (0, 0, 0, 0)


def test_oldest_first_and_no_job_twice(server: ServerQueue, worker: WorkerQueue) -> None:
    with closing(WorkerQueue.open(server.root, None, "cpu")) as other:
        assert other.name == "dev2"
        for seq in range(6):
            server.submit(make_job(seq))
        first, second = worker.claim(2), other.claim(9)
    assert [claim.job.seq for claim in first] == [0, 1]
    assert [claim.job.seq for claim in second] == [2, 3, 4, 5]


def test_claim_skips_what_it_is_told_to(server: ServerQueue, worker: WorkerQueue) -> None:
    for seq in range(3):
        server.submit(make_job(seq))
    assert [claim.job.seq for claim in worker.claim(9, skip={0, 2})] == [1]
    assert not worker.wait(0, skip={0, 2})
    assert worker.wait(0)


def test_a_job_that_failed_is_claimed_alone_and_given_up_at_the_third_time(
    server: ServerQueue, worker: WorkerQueue
) -> None:
    for seq in range(3):
        server.submit(make_job(seq))
    claims = worker.claim(1)
    for attempt in range(3):
        [claim] = claims
        assert (claim.job.seq, claim.attempt) == (0, attempt)
        worker.fail(claim, f"Traceback: try {attempt}")
        worker._look_at = 0.0
        claims = worker.claim(9) if attempt < 2 else []
    assert server.finished() == []
    assert server.given_up[0].attempt == 2
    assert "try 2" in server.given_up[0].reason
    assert server.open_jobs == 2
    assert names(server, "quarantine") == [
        "0000000000.a02_failed.reason",
        "0000000000.a02_failed.safetensors",
    ]
    assert server.counts().quarantined == 1
    assert server.healing == type(server.healing)()


def test_a_given_up_job_can_be_tried_once_more_by_hand(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    for _ in range(3):
        worker._look_at = 0.0
        worker.fail(worker.claim(1)[0], "no")
    server.finished()
    assert retry_given_up(server.root, 0)
    assert not retry_given_up(server.root, 0)
    assert names(server, "quarantine") == []
    worker._look_at = 0.0
    serve(worker)
    assert take_all(server) == [0]
    assert server.given_up == {}


def test_a_broken_result_of_a_given_up_job_is_set_aside_and_nothing_else(
    server: ServerQueue, worker: WorkerQueue
) -> None:
    server.submit(make_job(0))
    for _ in range(3):
        worker._look_at = 0.0
        worker.fail(worker.claim(1)[0], "no")
    server.finished()
    retry_given_up(server.root, 0)
    worker._look_at = 0.0
    serve(worker)
    [result] = (server.root / "queue").iterdir()
    result.write_bytes(result.read_bytes()[:-1])
    assert take_all(server) == []
    assert server.given_up.keys() == {0}
    assert [(aside.seq, aside.kind) for aside in quarantined(server.root)] == [(0, "broken")]
    assert names(server) == []


def test_handing_back_costs_no_attempt(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    worker.hand_back(worker.claim(1)[0])
    assert names(server) == ["0000000000.a00_pending.safetensors"]
    worker._look_at = 0.0
    worker.claim(1)
    worker.close()
    assert names(server) == ["0000000000.a00_pending.safetensors"]


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


def test_a_restarted_worker_frees_its_own_leftovers_first(server: ServerQueue) -> None:
    first = WorkerQueue.open(server.root, 1, "cpu")
    server.submit(make_job(0))
    (server.root / "tmp" / "dev1").mkdir()
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


def test_a_second_result_is_archived_and_never_returned(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    [claim] = worker.claim(1)
    worker.complete(claim, answer(claim))
    assert take_all(server) == [0]
    worker.complete(claim, answer(claim))
    assert take_all(server) == []
    assert server.healing.duplicates == 1
    assert "0000000000.a00_duplicate_from_dev1.safetensors" in names(server, "done")


def test_a_result_of_a_job_that_was_never_issued_is_set_aside(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    [claim] = worker.claim(1)
    stranger = claim._replace(job=make_job(9), name=claim.name._replace(seq=9))
    worker.complete(stranger, answer(stranger))
    assert server.finished() == []
    assert server.healing.unknown == 1
    assert "no job 9 was issued" in quarantined(server.root)[0].reason


@pytest.mark.parametrize("damage", ["pending", "complete"])
def test_a_broken_file_is_set_aside_and_its_job_issued_again(
    server: ServerQueue, worker: WorkerQueue, damage: str
) -> None:
    server.submit(make_job(0))
    if damage == "complete":
        serve(worker)
    [path] = (server.root / "queue").iterdir()
    path.write_bytes(path.read_bytes()[:-3] + b"???")
    worker._look_at = 0.0
    serve(worker)
    assert take_all(server) == []
    assert names(server) == ["0000000000.a01_pending.safetensors"]
    assert server.healing.broken == 1
    [aside] = quarantined(server.root)
    assert (aside.seq, aside.kind) == (0, "broken")
    assert aside.reason
    worker._look_at = 0.0
    serve(worker)
    assert take_all(server) == [0]


def test_a_job_whose_files_break_every_time_is_given_up(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    for _ in range(3):
        [path] = (server.root / "queue").iterdir()
        path.write_bytes(b"")
        worker._look_at = 0.0
        assert worker.claim(1) == []
        server.finished()
    assert server.given_up.keys() == {0}
    assert names(server) == []


def test_a_result_for_another_prompt_is_refused(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    [claim] = worker.claim(1)
    worker.complete(claim, make_group(make_job(0, prompt="something else")))
    assert take_all(server) == []
    assert "another job" in quarantined(server.root)[0].reason


def test_a_job_whose_file_vanished_is_issued_again_and_counted(server: ServerQueue) -> None:
    server.submit(make_job(0))
    next((server.root / "queue").iterdir()).unlink()
    for look in range(3):
        assert server.healing.missing == 0, look
        server.finished()
    assert server.healing.missing == 1
    assert names(server) == ["0000000000.a01_pending.safetensors"]


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


def die_as_server(server: ServerQueue) -> None:
    server._lock.release()


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


def test_only_checkpointed_groups_are_trimmed(server: ServerQueue, worker: WorkerQueue) -> None:
    for seq in range(6):
        server.submit(make_job(seq))
    serve(worker)
    take_all(server)
    assert server.trim_done(1, consumed={0, 1, 2}) == 3
    assert [int(name[:10]) for name in names(server, "done")] == [3, 4, 5]
    assert server.trim_done(1, consumed=range(6)) == 2
    assert [int(name[:10]) for name in names(server, "done")] == [5]


def test_one_server_and_one_worker_of_a_number(server: ServerQueue, worker: WorkerQueue) -> None:
    with pytest.raises(RunDirError, match=f"process {os.getpid()}"):
        ServerQueue.open(server.root, RUN)
    with pytest.raises(QueueError, match=f"dev1 runs already: process {os.getpid()}"):
        WorkerQueue.open(server.root, 1, "cpu")
    assert [(state.name, state.pid) for state in server.workers()] == [("dev1", os.getpid())]


def test_the_number_of_open_jobs_is_bounded(tmp_path: Path) -> None:
    with closing(ServerQueue.open(tmp_path / "q", RUN, max_open=1, watch_workers=False)) as server:
        server.submit(make_job(0))
        with pytest.raises(QueueError, match="bound"):
            server.submit(make_job(1))


def test_files_that_are_not_ours_are_left_alone(server: ServerQueue, worker: WorkerQueue) -> None:
    odd = [
        "notes.txt",
        "0000000000.a00_pending.safetensors.bak",
        "x0000000000.a00_pending.safetensors",
        "1_pending",
    ]
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


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q").chmod(0o777)
    with pytest.raises(RunDirError, match="chmod go-w"):
        ServerQueue.open(tmp_path / "q", RUN)
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "real" / "queue").symlink_to(tmp_path)
    with pytest.raises(RunDirError, match="links are not followed"):
        ServerQueue.open(tmp_path / "real", RUN)


def test_nfs_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "network_file_system", lambda path: "NFS")
    with pytest.raises(RunDirError, match="NFS a rename may report a failure"):
        ServerQueue.open(tmp_path / "q", RUN)
    assert 0x6969 in filesystem._NETWORK_FILE_SYSTEMS


def test_the_kind_of_file_system_is_asked_of_the_kernel(tmp_path: Path) -> None:
    assert filesystem.network_file_system(tmp_path) is None


def test_counts_can_be_read_by_anyone(server: ServerQueue, worker: WorkerQueue) -> None:
    for seq in range(3):
        server.submit(make_job(seq))
    worker.claim(1)
    assert queue_counts(server.root) == (2, 1, 0, 0)
    assert worker.pending() == 2
    assert server.unclaimed() == [1, 2]
    assert worker.alive_workers() == 1


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


class RecordedFiles(filesystem.OsFiles):
    """Says what was done to the disk, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.done: list[str] = []

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        self.done.append(f"write {path.partition('/')[0]}")

    def rename(self, path: str, to: str) -> None:
        super().rename(path, to)
        self.done.append(f"rename {path.partition('/')[0]} to {to.partition('/')[0]}")

    def sync(self, path: str) -> None:
        super().sync(path)
        self.done.append(f"sync {path.partition('/')[0]}")

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.done.append(f"remove {path.partition('/')[0]}")


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_result_is_on_the_disk_before_its_claim_is_dropped(server: ServerQueue, durable: bool) -> None:
    server.submit(make_job(0))
    files = RecordedFiles(server.root)
    with closing(WorkerQueue.open(server.root, 1, "cpu", files=files, durable=durable)) as worker:
        [claim] = worker.claim(1)
        files.done.clear()
        worker.complete(claim, answer(claim))
        if durable:
            assert files.done == ["write tmp", "sync tmp", "rename tmp to queue", "sync queue", "remove queue"]
        else:
            assert files.done == ["write tmp", "rename tmp to queue", "remove queue"]
    assert take_all(server) == [0]
