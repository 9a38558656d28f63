"""The life of a job on one directory, with server and worker in one process: claims, attempts, damaged files."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from queue_samples import answer, make_group, make_job, names, same_group, serve, take_all

from async_grpo.queue import ServerQueue, WorkerQueue, codec, quarantined, retry_given_up
from async_grpo.queue.codec import decode_group, encode_group
from async_grpo.queue.names import COMPLETE, JobName


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


def test_a_second_result_is_archived_and_never_returned(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    [claim] = worker.claim(1)
    worker.complete(claim, answer(claim))
    assert take_all(server) == [0]
    worker.complete(claim, answer(claim))
    assert take_all(server) == []
    assert server.healing.duplicates == 1
    assert "0000000000.a00_duplicate_from_dev1.safetensors" in names(server, "done")


@pytest.mark.parametrize("is_sound", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_result_of_an_attempt_that_was_never_made_is_set_aside(
    server: ServerQueue, worker: WorkerQueue, is_open: bool, is_sound: bool
) -> None:
    """Archived, it would be an anomaly of the audit for good. The job itself goes on."""
    server.submit(make_job(0))
    if not is_open:
        serve(worker)
        assert take_all(server) == [0]
    claims = worker.claim(1)
    planted = JobName(0, 99, COMPLETE, "dev1")
    group = encode_group(make_group(make_job(0), 99))
    (server.root / "queue" / str(planted)).write_bytes(group if is_sound else b"nothing")
    assert take_all(server) == []
    assert [path.name for path in (server.root / "done").rglob("*a99*")] == []
    [reason] = (server.root / "quarantine").glob("*.a99_broken*.reason")
    assert "attempt 99 of this job was never made" in reason.read_text()
    for claim in claims:
        worker.complete(claim, answer(claim))
    assert take_all(server) == ([0] if is_open else [])


def test_a_second_result_that_cannot_be_read_is_set_aside(server: ServerQueue, worker: WorkerQueue) -> None:
    server.submit(make_job(0))
    serve(worker)
    assert take_all(server) == [0]
    (server.root / "queue" / str(JobName(0, 1, COMPLETE, "dev2"))).write_bytes(b"nothing")
    assert take_all(server) == []
    assert [path.name for path in (server.root / "done").rglob("*a01*")] == []
    assert server.healing.duplicates == 0


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


def test_a_result_whose_row_is_nested_too_deeply_to_compare_is_refused(
    server: ServerQueue, worker: WorkerQueue
) -> None:
    server.submit(make_job(0))
    [claim] = worker.claim(1)
    worker.complete(claim, answer(claim))
    [entry] = server.finished()
    result = server.root / "queue" / str(entry)
    schema = codec._GROUP
    group = decode_group(result.read_bytes())
    header = schema.header.of(group, [])
    header["job"]["row"] = {"prompt": json.loads("[" * 900 + "]" * 900)}
    tensors = {name: array for name in schema.arrays if (array := getattr(group, name)) is not None}
    texts = np.frombuffer(json.dumps(schema.texts.of(group, [])).encode(), np.uint8)
    result.write_bytes(codec._pack(schema, header, {**tensors, "texts": texts}))
    assert server.take(entry) is None
    assert names(server) == ["0000000000.a01_pending.safetensors"]


def test_a_reason_that_cannot_be_read_does_not_hide_that_the_job_was_given_up(
    server: ServerQueue, worker: WorkerQueue
) -> None:
    server.submit(make_job(0))
    for _ in range(3):
        worker._look_at = 0.0
        worker.fail(worker.claim(1)[0], "no")
    [reason] = (server.root / "quarantine").glob("*.reason")
    reason.unlink()
    reason.symlink_to(server.root / "server.lock")
    assert server.finished() == []
    assert "cannot be read" in server.given_up[0].reason


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
