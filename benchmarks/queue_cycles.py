"""Full cycles of a job through a queue, ours or another, in cycles a second.

A cycle is: 2 KiB job issued, claimed, 64 KiB result published, taken and archived; at most 16 jobs are open.

Every queue is measured twice: with "records" that are encoded, checked and decoded, which is the work that somebody
who used it here would have, and with "bytes" that nobody looks at, which is the queue alone. In a run ours always moves
records; for "bytes" its codec is taken out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
from benchmarks.processes import running, wait_until
from benchmarks.queue_peers import PEERS, Channel

from async_grpo.queue import Claim, ServerQueue, WorkerQueue
from async_grpo.queue import server as queue_server
from async_grpo.queue import worker as queue_worker
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job
from async_grpo.queue.names import JobName
from async_grpo.records import Job, RolloutGroup

RUN = "benchmark"
OPEN_JOBS = 16
IDLE_S = 0.0001  # a peer that finds nothing looks again after that; ours waits for an event
JOB = os.urandom(1024).hex().encode()  # 2 KiB
RESULT = os.urandom(64 << 10)


def make_job(seq: int) -> Job:
    content = {"prompt": JOB[:1700].decode()}
    return Job(run_id=RUN, seq=seq, row=content, num_generations=16, seed=seq, born_version=0, min_version=0)


def make_group(job: Job, attempt: int, worker: str, *, tokens: int = 500, text: str = "") -> RolloutGroup:
    """16 completions; with 500 tokens each a file of 64 KiB."""
    count = 16 * tokens
    return RolloutGroup(
        job=job,
        attempt=attempt,
        worker=worker,
        policy_version=1,
        reward_names=("right", "format"),
        prompt_ids=np.arange(100, dtype=np.int32),
        completion_lengths=np.full(16, tokens, np.int32),
        completion_ids=np.arange(count, dtype=np.int32) * 7919 % 150_000,
        sampling_logprobs=np.linspace(-5, 0, count, dtype=np.float32),
        tool_mask=None,
        rewards=np.zeros((16, 2), np.float32),
        completions=[text] * 16,
    )


def answer(job: Job, attempt: int, worker: str) -> RolloutGroup:
    """A result of 64 KiB whose arrays are there already."""
    return RolloutGroup(**{**ANSWER, "job": job, "attempt": attempt, "worker": worker})


ANSWER = {name: getattr(make_group(make_job(0), 0, ""), name) for name in RolloutGroup.__dataclass_fields__}


def without_codec() -> ExitStack:
    """The queue does all that it does, but writes the same bytes every time, and looks at none."""

    def group(data: bytearray, name: JobName, run_id: str, *, most_attempt: int) -> RolloutGroup:
        return answer(make_job(name.seq), name.attempt, str(name.worker))

    patches = ExitStack()
    patches.enter_context(patch.object(queue_server, "encode_job", lambda job: JOB))
    patches.enter_context(patch.object(queue_worker, "decode_job", lambda data, name: make_job(name.seq)))
    patches.enter_context(patch.object(queue_worker, "encode_group", lambda group: RESULT))
    patches.enter_context(patch.object(queue_server, "read_result", group))
    return patches


def cycles_of_ours(
    root: Path, workers: int, jobs: int, *, records: bool = True, durable: bool = False, keep: int | None = None
) -> float:
    """Full cycles a second through `ServerQueue` and `WorkerQueue`; `keep`: of the results, None for all."""
    server = ServerQueue.open(root / "q", RUN)
    with (
        ExitStack() if records else without_codec(),
        running(workers, lambda number: ours_works(root / "q", number, durable)),
    ):
        wait_until(lambda: len(server.workers()) == workers)
        started, issued, taken, trimmed = time.perf_counter(), 0, 0, 0
        while taken < jobs:
            while issued < jobs and server.open_jobs < OPEN_JOBS:
                server.submit(make_job(issued))
                issued += 1
            entries = server.finished()
            taken += sum(server.take(entry) is not None for entry in entries)
            if keep is not None and taken - trimmed >= keep:
                trimmed = taken
                server.trim_done(keep, consumed=range(issued))
            if not entries:
                server.wait(1)
        seconds = time.perf_counter() - started
    assert not any(asdict(server.healing).values()), server.healing
    server.close()
    return jobs / seconds


def ours_works(root: Path, number: int, durable: bool) -> None:
    worker = WorkerQueue.open(root, number, "cpu", durable=durable)
    while True:
        claims: list[Claim] = worker.claim(4)
        for claim in claims:
            worker.complete(claim, answer(claim.job, claim.attempt, worker.name))
        if not claims:
            worker.wait(1)


def cycles_of_peer(root: Path, workers: int, jobs: int, name: str, records: bool) -> float:
    """Full cycles a second, of bytes that nobody looks at or of the same records as ours."""
    peer = PEERS[name]
    with peer.server(root):
        todo, results = peer.channel(root / "jobs"), peer.channel(root / "results")
        with running(workers, lambda number: peer_works(peer.channel, root, records)):
            time.sleep(0.3)
            started, issued, taken = time.perf_counter(), 0, 0
            while taken < jobs:
                while issued < jobs and issued - taken < OPEN_JOBS:
                    todo.put(encode_job(make_job(issued)) if records else JOB)
                    issued += 1
                found = results.claim()
                if found is None:
                    assert time.perf_counter() - started < 60, f"{name}: {jobs - taken} of {jobs} results are missing"
                    time.sleep(IDLE_S)
                    continue
                if records:
                    decode_group(found[1], run_id=RUN)
                results.done(found[0])
                taken += 1
            return jobs / (time.perf_counter() - started)


def peer_works(make: Callable[[Path], Channel], root: Path, records: bool) -> None:
    todo, results = make(root / "jobs"), make(root / "results")
    while True:
        found = todo.claim()
        if found is None:
            time.sleep(IDLE_S)
            continue
        results.put(encode_group(answer(decode_job(found[1], run_id=RUN), 0, "dev1")) if records else RESULT)
        todo.done(found[0])
