"""Groups a second through the real queue and the trainer's real job source, when generating takes no time.

The server's side is what the parameter server runs between two optimizer steps, less TRL: `RolloutSource` over
`ServerQueue`. The workers are real `WorkerQueue`s, which hand every job back at once with the same canned group.
Either one process plays them all, by turns: then only the queue and the server can be what does not scale. Or each has
a process of its own, asleep until a job wakes it: then they also share the cores of the machine.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks.processes import running

from async_grpo.job_queue import Claim, ServerQueue, WorkerQueue
from async_grpo.records import RolloutGroup
from async_grpo.training.admission import Schedule
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.rollout_source import RolloutSource

RUN_ID = "capacity"
GROUPS_PER_STEP = 16
GENERATIONS, TOKENS = 8, 48
PROMPT = np.arange(6, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    workers: int
    groups_per_s: float
    server_cpu_ms: float  # of the server's process, for a group


def measure(workers: int, folder: Path, seconds: float, *, own_processes: bool) -> Capacity:
    """`workers` simulated workers serve one server for about `seconds`."""
    numbers = range(1, workers + 1)
    played = [[number] for number in numbers] if own_processes else [numbers]
    with _source(folder) as source, running(len(played), lambda number: _work(played[number - 1], folder)):
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


def _work(numbers: Sequence[int], folder: Path) -> None:
    """Play these workers: whoever's turn it is does one job, or waits for one."""
    queues = [WorkerQueue.open(folder, number, "cpu") for number in numbers]
    canned: dict[str, RolloutGroup] = {}
    for queue in itertools.cycle(queues):
        claims = queue.claim(1)
        for claim in claims:
            canned[queue.name] = _answer(claim, queue.name, canned.get(queue.name))
            queue.complete(claim, canned[queue.name])
        if not claims:
            queue.wait(0.1)


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
