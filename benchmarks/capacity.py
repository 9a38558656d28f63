"""Groups a second through the real queue and the trainer's real job source, when generating takes no time.

The server's side is what the parameter server runs between two optimizer steps, less TRL: `RolloutSource` over
`ServerQueue`. The workers are real `WorkerQueue`s, each in a thread, spread over a few processes, which hand every job
back at once with the same canned group.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.job_queue import Claim, ServerQueue, WorkerQueue
from async_grpo.records import RolloutGroup
from async_grpo.training.admission import Schedule
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.rollout_source import RolloutSource

RUN_ID = "capacity"
GROUPS_PER_STEP = 16
GENERATIONS, TOKENS = 8, 48
WORKER_PROCESSES = 2
PROMPT = np.arange(6, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    workers: int
    groups_per_s: float
    server_cpu_ms: float  # of the server's process, for a group


def measure(workers: int, folder: Path, seconds: float) -> Capacity:
    """`workers` simulated workers serve one server for about `seconds`."""
    with _source(folder) as source, _simulated_workers(workers, folder):
        version = 0
        for _ in range(3):  # until every worker has come
            version = _step(source, version)
        started, cpu = time.monotonic(), time.thread_time()
        first = version
        while time.monotonic() - started < seconds:
            version = _step(source, version)
        took, cpu = time.monotonic() - started, time.thread_time() - cpu
    groups = (version - first) * GROUPS_PER_STEP
    return Capacity(workers=workers, groups_per_s=groups / took, server_cpu_ms=1e3 * cpu / groups)


def _step(source: RolloutSource, version: int) -> int:
    source.take(version)
    source.trained()
    source.advance(version + 1)
    return version + 1


@contextmanager
def _source(folder: Path) -> Iterator[RolloutSource]:
    rows = ({"prompt": "07+41=", "answer": "048"} for _ in itertools.count())
    queue = ServerQueue.open(folder, RUN_ID)
    try:
        source = RolloutSource(
            queue=queue,
            prompts=lambda start: rows,
            schedule=Schedule(
                groups_per_round=GROUPS_PER_STEP, micro_steps_per_round=1, micro_steps_per_version=1, max_staleness=4
            ),
            run_id=RUN_ID,
            seed=0,
            num_generations=GENERATIONS,
            metrics=RolloutMetrics(lambda name, value: None),
            published_version=lambda: 0,
            keep_publishing=lambda: None,
            should_stop=lambda: False,
            max_wait_s=60.0,
        )
        source.advance(0)
        yield source
    finally:
        queue.close()


@contextmanager
def _simulated_workers(count: int, folder: Path) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    shares = [list(range(1 + part, 1 + count, WORKER_PROCESSES)) for part in range(WORKER_PROCESSES)]
    processes = [
        context.Process(target=_work_in_threads, args=(numbers, folder, stop), daemon=True)
        for numbers in shares
        if numbers
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(timeout=30)


def _work_in_threads(numbers: list[int], folder: Path, stop: Any) -> None:
    threads = [threading.Thread(target=_work, args=(number, folder, stop)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(number: int, folder: Path, stop: Any) -> None:
    queue = WorkerQueue.open(folder, number, "cpu")
    canned: RolloutGroup | None = None
    while not stop.is_set():
        claims = queue.claim(1)
        for claim in claims:
            canned = _answer(claim, queue.name, canned)
            queue.complete(claim, canned)
        if not claims:
            queue.wait(0.1)
    queue.close()


def _answer(claim: Claim, worker: str, canned: RolloutGroup | None) -> RolloutGroup:
    version = claim.job.born_version
    if canned is not None:
        return replace(canned, job=claim.job, attempt=claim.attempt, policy_version=version)
    tokens = GENERATIONS * TOKENS
    return RolloutGroup(
        job=claim.job,
        attempt=claim.attempt,
        worker=worker,
        policy_version=version,
        reward_names=("accuracy",),
        prompt_ids=PROMPT,
        completion_lengths=np.full(GENERATIONS, TOKENS, dtype=np.int32),
        completion_ids=np.arange(tokens, dtype=np.int32) % 10,
        sampling_logprobs=np.full(tokens, -1.5, dtype=np.float32),
        tool_mask=None,
        rewards=np.arange(GENERATIONS, dtype=np.float32)[:, None] % 2,
        completions=["048" + "=" * (TOKENS - 4)] * GENERATIONS,
    )
