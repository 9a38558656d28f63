"""The life of a job on one directory, with server and worker in one process: claims, attempts, damaged files."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from threading import Thread

import pytest
from queue_samples import (
    answer,
    die,
    fail_for_good,
    make_group,
    make_job,
    names,
    same_group,
    seqs,
    serve,
    submit,
    take_all,
)

from async_grpo.queue import ServerQueue, WorkerQueue, quarantined, retry_given_up
from async_grpo.queue.codec import encode_group
from async_grpo.queue.names import COMPLETE, JobName
from async_grpo.queue.server import MAX_OPEN
from async_grpo.records import Job, Purpose


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
        submit(server, *range(6))
        assert (seqs(worker.claim(2)), seqs(other.claim(9))) == ([0, 1], [2, 3, 4, 5])


def test_claim_skips_what_it_is_told_to(server: ServerQueue, worker: WorkerQueue) -> None:
    submit(server, 0, 1, 2)
    assert seqs(worker.claim(9, skip={0, 2})) == [1]
    assert not worker.wait(0, skip={0, 2})
    assert worker.wait(0)


def test_handing_back_costs_no_attempt(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    worker.hand_back(worker.claim(1)[0])
    assert names(server) == ["0000000000.a00_pending.safetensors"]
    worker._look_at = 0.0
    worker.claim(1)
    worker.close()
    assert names(server) == ["0000000000.a00_pending.safetensors"]


@pytest.mark.parametrize("how", ["fails", "kills its worker"])
def test_a_job_that_failed_is_claimed_alone_and_given_up_at_the_third_time(server: ServerQueue, how: str) -> None:
    submit(server, 0, 1, 2)
    for attempt in range(3):
        worker = WorkerQueue.open(server.root, 1, "cpu")
        claims = worker.claim(9)
        assert seqs(claims) == ([0] if attempt else [0, 1, 2])
        assert claims[0].attempt == attempt
        if how == "fails":
            worker.fail(claims[0], f"Traceback: try {attempt}")
            worker.close()
        else:
            die(worker)
            server.recover_dead()
    assert server.finished() == []
    assert server.given_up.keys() == {0} and server.given_up[0].attempt == 2
    assert ("try 2" if how == "fails" else "Worker dev1 died") in server.given_up[0].reason
    assert names(server, "quarantine") == ["0000000000.a02_failed.reason", "0000000000.a02_failed.safetensors"]
    assert server.counts().quarantined == 1
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as worker:
        serve(worker)
        serve(worker)
    assert take_all(server) == [1, 2]
    assert server.healing == type(server.healing)()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_given_up_job_can_be_tried_once_more_by_hand(
    server: ServerQueue, worker: WorkerQueue, is_broken: bool
) -> None:
    server.submit(make_job(0))
    fail_for_good(worker)
    server.finished()
    assert retry_given_up(server.root, 0)
    assert not retry_given_up(server.root, 0)
    assert names(server, "quarantine") == []
    serve(worker)
    [result] = (server.root / "queue").iterdir()
    result.write_bytes(result.read_bytes()[: -1 if is_broken else None])
    assert take_all(server) == ([] if is_broken else [0])
    assert server.given_up.keys() == ({0} if is_broken else set())
    assert [aside.kind for aside in quarantined(server.root)] == (["broken"] if is_broken else [])
    assert names(server) == []


@pytest.mark.parametrize(
    ("attempt", "is_open", "is_sound"),
    [(99, True, True), (99, True, False), (99, False, True), (99, False, False), (1, False, False)],
)
def test_a_result_of_an_attempt_that_was_never_made_is_set_aside(
    server: ServerQueue, worker: WorkerQueue, attempt: int, is_open: bool, is_sound: bool
) -> None:
    """Archived, it would be an anomaly of the audit for good. The job itself goes on."""
    server.submit(make_job(0))
    if not is_open:
        serve(worker)
        assert take_all(server) == [0]
    claims = worker.claim(1)
    planted = JobName(0, attempt, COMPLETE, "dev2")
    group = encode_group(make_group(make_job(0), attempt, "dev2"))
    (server.root / "queue" / str(planted)).write_bytes(group if is_sound else b"nothing")
    assert take_all(server) == []
    assert [path.name for path in (server.root / "done").rglob(f"*a{attempt:02d}*")] == []
    [aside] = quarantined(server.root)
    assert (aside.kind, aside.attempt, server.healing.duplicates) == ("broken", attempt, 0)
    assert attempt == 1 or "attempt 99 of this job was never made" in aside.reason
    for claim in claims:
        worker.complete(claim, answer(claim))
    assert take_all(server) == ([0] if is_open else [])


@pytest.mark.parametrize("other", [make_job(0, prompt="something else"), replace(make_job(0), purpose="eval")])
def test_a_result_for_another_prompt_is_refused(server: ServerQueue, worker: WorkerQueue, other: Job) -> None:
    server.submit(make_job(0))
    [claim] = worker.claim(1)
    worker.complete(claim, make_group(other))
    assert take_all(server) == []
    assert "another job" in quarantined(server.root)[0].reason


def test_a_result_of_a_job_that_was_never_issued_is_set_aside(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    [claim] = worker.claim(1)
    stranger = claim._replace(job=make_job(9), name=claim.name._replace(seq=9))
    worker.complete(stranger, answer(stranger))
    assert server.finished() == []
    assert server.healing.unknown == 1
    assert "no job 9 was issued" in quarantined(server.root)[0].reason


def test_a_job_whose_files_break_every_time_is_given_up(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    for attempt in range(3):
        [path] = (server.root / "queue").iterdir()
        assert path.name == f"0000000000.a{attempt:02d}_pending.safetensors"
        path.write_bytes(b"")
        worker._look_at = 0.0
        assert worker.claim(1) == []
        server.finished()
    assert (server.given_up.keys(), server.healing.broken, names(server)) == ({0}, 3, [])


def test_a_job_whose_file_vanished_is_issued_again_and_counted(server: ServerQueue) -> None:
    server.submit(make_job(0))
    next((server.root / "queue").iterdir()).unlink()
    for look in range(3):
        assert server.healing.missing == 0, look
        server.finished()
    assert server.healing.missing == 1
    assert names(server) == ["0000000000.a01_pending.safetensors"]


def test_a_reason_that_cannot_be_read_does_not_hide_that_the_job_was_given_up(
    server: ServerQueue, worker: WorkerQueue
) -> None:
    server.submit(make_job(0))
    fail_for_good(worker)
    [reason] = (server.root / "quarantine").glob("*.reason")
    reason.unlink()
    reason.symlink_to(server.root / "server.lock")
    assert server.finished() == []
    assert "cannot be read" in server.given_up[0].reason


@pytest.mark.parametrize("purpose", ["eval", "generate"])
def test_a_group_of_another_purpose_is_never_handed_to_training(
    server: ServerQueue, worker: WorkerQueue, purpose: Purpose
) -> None:
    server.submit(replace(make_job(0), purpose=purpose))
    server.submit(make_job(1))
    serve(worker)
    assert [entry.seq for entry in server.finished()] == [1]
    assert [entry.seq for entry in server.finished(purpose)] == [0]


def test_results_that_nobody_takes_wake_the_server_once(server: ServerQueue, worker: WorkerQueue) -> None:
    """Two results of a job for another purpose: both stay where they are."""
    server.submit(replace(make_job(0), purpose="eval"))
    serve(worker)
    first = server.root / "queue" / "0000000000.a00_complete_from_dev1.safetensors"
    (first.parent / "0000000000.a01_complete_from_dev2.safetensors").write_bytes(first.read_bytes())
    assert server._something_new()
    assert server.finished("train") == []
    assert not server._something_new()
    assert [entry.attempt for entry in server.finished("eval")] == [0]


@pytest.mark.slow
def test_no_job_is_taken_for_missing_where_a_listing_misses_it(server: ServerQueue) -> None:
    submit(server, *range(MAX_OPEN))
    ends_at = time.monotonic() + 300.0
    taken: list[int] = []

    def work(number: int) -> None:
        with closing(WorkerQueue.open(server.root, number, "cpu")) as worker:
            while len(taken) < MAX_OPEN and time.monotonic() < ends_at:
                serve(worker)

    threads = [Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    while len(taken) < MAX_OPEN and time.monotonic() < ends_at:
        taken += take_all(server)
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(MAX_OPEN))
    assert (server.healing.missing, server.healing.duplicates) == (0, 0)
