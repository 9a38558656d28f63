"""Jobs and groups for the tests of the queue, and what its processes do in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from async_grpo.queue import Claim, ServerQueue, WorkerQueue
from async_grpo.records import Job, RolloutGroup, Timings
from kit import groups
from kit.groups import RUN


def make_job(seq: int, run_id: str = RUN, **row: Any) -> Job:
    row = {"prompt": f"{seq}+{seq}=", **row}
    return groups.make_job(seq, run_id=run_id, row=row, seed=1000 + seq, born_version=seq // 4)


def submit(server: ServerQueue, *seqs: int) -> None:
    for seq in seqs:
        server.submit(make_job(seq))


def seqs(claims: list[Claim]) -> list[int]:
    return [claim.job.seq for claim in claims]


def make_group(job: Job, attempt: int = 0, worker: str = "dev1", **changes: Any) -> RolloutGroup:
    """A group whose content follows from the job alone, so that anyone can tell whether it is right."""
    random = np.random.default_rng(job.seed)
    fields: dict[str, Any] = {
        "attempt": attempt,
        "worker": worker,
        "reward_names": ("right", "format"),
        "prompt_ids": random.integers(0, 1000, 5).astype(np.int32),
        "completion_lengths": np.array([3, 4], np.int32),
        "completion_ids": random.integers(0, 1000, 7).astype(np.int32),
        "sampling_logprobs": -random.random(7).astype(np.float32),
        "rewards": np.array([[1.0, np.nan], [0.0, 0.5]], np.float32),
        "completions": ["is \N{SNOWMAN}\n", [{"role": "assistant", "content": "x"}]],
        "metrics": {"length": [3.0, 4.0]},
        "extra_columns": {"note": ["a", None]},
        "timings": Timings(adopt_s=0.1, generate_s=0.2, score_s=0.3),
    }
    return groups.make_group(job, 3, **{**fields, **changes})


def answer(claim: Claim, worker: str = "dev1") -> RolloutGroup:
    return make_group(claim.job, claim.attempt, worker)


def same_group(one: RolloutGroup, other: RolloutGroup) -> bool:
    """Equal, arrays byte by byte."""
    for name in RolloutGroup.__dataclass_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            if mine.dtype != theirs.dtype or mine.shape != theirs.shape or mine.tobytes() != theirs.tobytes():
                return False
        elif mine != theirs:
            return False
    return True


def names(server: ServerQueue, folder: str = "queue") -> list[str]:
    return sorted(path.name for path in (server.root / folder).rglob("*") if path.is_file())


def die(worker: WorkerQueue) -> None:
    """What the kernel does for a killed process: its lock is free, its claims stay."""
    worker._lock.release()
    worker._claims.clear()  # so that the fixture can close it


def serve(worker: WorkerQueue, limit: int = 8) -> None:
    worker._look_at = 0.0  # look at the directory, whatever the pipe tells
    for claim in worker.claim(limit):
        worker.complete(claim, answer(claim, worker.name))


def fail_for_good(worker: WorkerQueue) -> None:
    """Fail the oldest job until it is given up."""
    for _ in range(3):
        worker._look_at = 0.0
        worker.fail(worker.claim(1)[0], "no")


def take_all(server: ServerQueue) -> list[int]:
    return [group.job.seq for entry in server.finished() if (group := server.take(entry))]


@contextmanager
def reopened(server: ServerQueue, **opened: Any) -> Iterator[ServerQueue]:
    """The next server of this directory."""
    server.close()
    with closing(ServerQueue.open(server.root, RUN, watch_workers=False, **opened)) as queue:
        yield queue
