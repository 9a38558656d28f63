"""Groups a second through the real queue and the trainer's real job source, when generating takes no time.

The server's side is what the parameter server runs between two optimizer steps, less TRL: `RolloutSource` over
`ServerQueue`. The workers are real `WorkerQueue`s, which hand every job back at once with the same canned group.
Either one process plays them all, by turns: then only the queue and the server can be what does not scale. Or each has
a process of its own, asleep until a job wakes it: then they also share the cores of the machine. What the machine has
for so many processes is measured beside it: the same records through two sockets, without files, lost in a crash.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from benchmarks.processes import running

from async_grpo.archive.history import ConsumptionRecord
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.queue.codec import decode_group, decode_job, encode_group, encode_job
from async_grpo.records import Job, RolloutGroup
from async_grpo.settings import DEFAULT_LIMIT
from async_grpo.training.checkpoints import UsedGroups
from async_grpo.training.job_issuer import JobIssuer
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.rollout_source import RolloutSource
from async_grpo.training.schedule import Schedule

RUN_ID = "capacity"
GROUPS_PER_STEP, MAX_STALENESS = 16, 4
GENERATIONS, TOKENS = 8, 48
PROMPT = np.arange(6, dtype=np.int32)
ROW = {"prompt": "07+41=", "answer": "048"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    groups_per_s: float
    server_cpu_ms: float  # of the server's process, for a group


def measure(workers: int, folder: Path, seconds: float, *, own_processes: bool) -> Capacity:
    """`workers` simulated workers serve one server."""
    numbers = range(1, workers + 1)
    played = [[number] for number in numbers] if own_processes else [numbers]
    with _source(folder) as source, running(len(played), lambda number: _work(played[number - 1], folder)):
        versions = itertools.count()

        def step() -> None:
            version = next(versions)
            source.take(version)
            source.trained()
            source.advance(version + 1)

        return _capacity(step, seconds)


def _capacity(step: Callable[[], None], seconds: float) -> Capacity:
    """Measure a server that does these steps, for `seconds` to warm up and as long again."""
    warm_up_ends = time.monotonic() + seconds
    while time.monotonic() < warm_up_ends:
        step()
    started, cpu, groups = time.monotonic(), time.thread_time(), 0
    while (took := time.monotonic() - started) < seconds:
        step()
        groups += GROUPS_PER_STEP
    return Capacity(groups_per_s=groups / took, server_cpu_ms=1e3 * (time.thread_time() - cpu) / groups)


@contextmanager
def _source(folder: Path) -> Iterator[RolloutSource]:
    queue = ServerQueue.open(folder, RUN_ID)
    history = ConsumptionRecord(
        folder / "consumed.jsonl", run_id=RUN_ID, resumed_from=None, max_staleness=MAX_STALENESS
    )
    try:
        source = RolloutSource(
            queue=queue,
            issuer=JobIssuer(
                queue,
                itertools.repeat(ROW),
                run_id=RUN_ID,
                seed=0,
                num_generations=GENERATIONS,
                archive=UsedGroups(queue, folder / "done", DEFAULT_LIMIT),
            ),
            schedule=Schedule(
                groups_per_round=GROUPS_PER_STEP,
                num_generations=GENERATIONS,
                micro_steps_per_round=1,
                micro_steps_per_version=1,
                max_staleness=MAX_STALENESS,
            ),
            publisher=cast(Any, _AlwaysTheFirst()),
            history=history,
            metrics=RolloutMetrics(lambda name, value: None),
            should_stop=lambda: False,
            max_wait_s=60.0,
            way_to_workers="the stand-ins have ended",
        )
        source.advance(0)
        yield source
    finally:
        queue.close()
        history.close()


class _AlwaysTheFirst:
    """A publisher of one version."""

    version, held_at = 0, None

    def retry(self) -> None:
        """There is nothing to publish."""


def _work(numbers: Sequence[int], folder: Path) -> None:
    """Play these workers: whoever's turn it is does one job, or waits for one."""
    queues = [WorkerQueue.open(folder, number, "cpu") for number in numbers]
    canned: dict[str, RolloutGroup] = {}
    for queue in itertools.cycle(queues):
        claims = queue.claim(1)
        for claim in claims:
            canned[queue.name] = _answer(claim.job, claim.attempt, queue.name, canned.get(queue.name))
            queue.complete(claim, canned[queue.name])
        if not claims:
            queue.wait(0.1)


def measure_sockets(workers: int, seconds: float) -> Capacity:
    """The same when the kernel hands each job to one of so many sleeping processes, and records are all there is."""
    jobs, to_workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    groups, to_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    issued = map(_job, itertools.count())

    def submit(count: int) -> None:
        for job in itertools.islice(issued, count):
            jobs.send(encode_job(job))

    def step() -> None:
        for _ in range(GROUPS_PER_STEP):
            decode_group(groups.recv(1 << 16))
        submit(GROUPS_PER_STEP)

    def work(number: int) -> None:
        canned: RolloutGroup | None = None
        while True:
            canned = _answer(decode_job(to_workers.recv(1 << 16)), 0, f"dev{number}", canned)
            to_server.send(encode_group(canned))

    with jobs, to_workers, groups, to_server, running(workers, work):
        groups.settimeout(30)
        submit(GROUPS_PER_STEP * (MAX_STALENESS + 1))
        return _capacity(step, seconds)


def _job(seq: int) -> Job:
    return Job(run_id=RUN_ID, seq=seq, row=ROW, num_generations=GENERATIONS, seed=seq, born_version=0, min_version=0)


def _answer(job: Job, attempt: int, worker: str, canned: RolloutGroup | None) -> RolloutGroup:
    version = job.born_version
    if canned is not None:
        return replace(canned, job=job, attempt=attempt, policy_version=version)
    tokens = GENERATIONS * TOKENS
    return RolloutGroup(
        job=job,
        attempt=attempt,
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
