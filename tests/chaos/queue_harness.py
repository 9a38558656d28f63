"""What the fault tests of the queue share: a trainer with checkpoints, and an independent log.

The log is written by `os.write` on an `O_APPEND` file, so that it survives a SIGKILL of its writers, and is read by
`replay`, which knows nothing of the queue: it decides whether every job had its effect once and only once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from async_grpo.queue import Claim, ServerQueue, WorkerQueue
from async_grpo.queue.server import Healing
from async_grpo.records import Job, RolloutGroup

RUN = "chaos"


def make_job(seq: int) -> Job:
    row = {"prompt": f"What is {seq} + {seq}?", "answer": str(2 * seq)}
    return Job(run_id=RUN, seq=seq, row=row, num_generations=2, seed=seq, born_version=0, min_version=0)


def make_group(job: Job, attempt: int, worker: str) -> RolloutGroup:
    """The content follows from the job's seed alone."""
    ids = (np.arange(24, dtype=np.int64) * 7919 + job.seed * 104729) % 50000
    return RolloutGroup(
        job=job,
        attempt=attempt,
        worker=worker,
        policy_version=job.born_version,
        reward_names=("right",),
        prompt_ids=ids[:8].astype(np.int32),
        completion_lengths=np.array([7, 9], np.int32),
        completion_ids=ids[8:].astype(np.int32),
        sampling_logprobs=(-ids[8:] / 50000).astype(np.float32),
        tool_mask=None,
        rewards=np.array([[1.0], [0.0]], np.float32),
        completions=[job.row["answer"], "?"],
    )


def digest(group: RolloutGroup) -> str:
    """Everything that the trainer would use."""
    arrays = (group.prompt_ids, group.completion_lengths, group.completion_ids, group.sampling_logprobs)
    parts = [array.tobytes() for array in (*arrays, group.rewards)]
    return hashlib.sha256(b"|".join([*parts, repr((group.job, group.completions)).encode()])).hexdigest()


class Log:
    """One JSON line an event.

    A kill can cut a write short where it crosses a page, so each event begins its line: what is cut spoils no other.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, event: str, **about: Any) -> None:
        os.write(self._fd, ("\n" + json.dumps({"event": event, **about})).encode())

    def close(self) -> None:
        os.close(self._fd)


def logged(path: Path) -> Iterator[dict[str, Any]]:
    """Every event but those whose writer was killed while it wrote: to everybody else, they have not happened."""
    for line in filter(None, path.read_text().split("\n")):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            assert '"crashed"' not in line, line


class Told(NamedTuple):
    """What a log says of a run."""

    applied: set[int]
    given_up: set[int]
    executions: int
    regenerated: set[int]  # jobs that were done again after the trainer had used them: they should be given back
    servers: int
    healing: dict[str, int]


def replay(path: Path, total: int) -> Told:
    """Read the log as a trainer that loses what came after its checkpoint when it is killed. Asserts guarantee 1."""
    applied: set[int] = set()
    given_up: set[int] = set()
    ever_applied: set[int] = set()
    regenerated: set[int] = set()
    healing: dict[str, int] = {}
    servers = executions = 0
    for event in logged(path):
        seq = event.get("seq")
        if event["event"] == "open":
            checkpoint = set(event["consumed"])
            assert checkpoint <= applied | given_up, "a checkpoint has what was never applied"
            applied, given_up = checkpoint - given_up, checkpoint & given_up
            servers += 1
        elif event["event"] == "apply":
            assert seq not in applied, f"job {seq} was applied twice"
            assert event["right"], f"job {seq} was applied with wrong data"
            applied.add(seq)
            ever_applied.add(seq)
            given_up.discard(seq)
        elif event["event"] == "give up":
            given_up.add(seq)
        elif event["event"] == "execute":
            executions += 1
            regenerated |= {seq} & ever_applied
        elif event["event"] == "healing":
            healing = event["counts"]
        elif event["event"] == "crashed":
            raise AssertionError(event["traceback"])
    lost = set(range(total)) - applied - given_up
    assert not lost, f"jobs {sorted(lost)[:9]} were lost"
    return Told(applied, given_up, executions, regenerated, servers, healing)


class Trainer:
    """A server that uses every group once and writes a checkpoint now and then, as the parameter server does."""

    def __init__(self, root: Path, total: int, log: Log, *, window: int = 8, steps: int = 3, **opened: Any) -> None:
        self._checkpoint = root.parent / f"{root.name}.checkpoint"
        self._log, self._total, self._window, self._steps = log, total, window, steps
        self.consumed = self.saved()
        log.write("open", consumed=sorted(self.consumed))
        self.queue = ServerQueue.open(root, RUN, consumed=self.consumed, **opened)
        self._next = 0
        self._since_checkpoint = 0

    def submit(self, below: int | None = None) -> None:
        """Issue jobs as far as the window admits."""
        while self._next < min(self._total, self._total if below is None else below):
            if self.queue.open_jobs >= self._window:
                return
            if self._next not in self.consumed:
                self.queue.submit(make_job(self._next))
            self._next += 1

    def collect(self) -> int:
        """Use what is finished; returns how many groups that were."""
        used = 0
        for entry in self.queue.finished():
            group = self.queue.take(entry)
            if group is not None:
                right = digest(group) == digest(make_group(make_job(entry.seq), group.attempt, group.worker))
                self._log.write("apply", seq=entry.seq, right=right)
                self._use(entry.seq)
                used += 1
        for seq in [seq for seq in self.queue.given_up if seq not in self.consumed]:
            self._log.write("give up", seq=seq)
            self._use(seq)
        if self.queue.healing != Healing():
            self._log.write("healing", counts=asdict(self.queue.healing))
        return used

    @property
    def done(self) -> bool:
        return len(self.consumed) >= self._total

    def checkpoint(self) -> None:
        """Write the consumed set, durably and atomically: the only thing that a trainer must sync."""
        temporary = self._checkpoint.with_suffix(".new")
        with temporary.open("w") as file:
            json.dump(sorted(self.consumed), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._checkpoint)
        self._since_checkpoint = 0

    def trim(self, keep: int) -> int:
        """Delete old groups that the checkpoint has."""
        return self.queue.trim_done(keep, consumed=self.saved())

    def _use(self, seq: int) -> None:
        self.consumed.add(seq)
        self._since_checkpoint += 1
        if self._since_checkpoint >= self._steps:
            self.checkpoint()

    def saved(self) -> set[int]:
        """What the last checkpoint has."""
        with suppress(FileNotFoundError):
            return set(json.loads(self._checkpoint.read_text()))
        return set()


def execute(worker: WorkerQueue, claim: Claim, log: Log, work_s: float = 0.0) -> None:
    """Do a job."""
    log.write("execute", seq=claim.job.seq, attempt=claim.attempt, worker=worker.name)
    if work_s:
        time.sleep(work_s)
    worker.complete(claim, make_group(claim.job, claim.attempt, worker.name))


def claim_now(worker: WorkerQueue, limit: int) -> list[Claim]:
    """Claim with a look at the directory, whatever the pipe tells."""
    worker._look_at = 0.0
    return worker.claim(limit)


def leftovers(root: Path) -> list[str]:
    """Files that must not be there once everything is drained."""
    found = (path for name in ("queue", "tmp") for path in (root / name).rglob("*"))
    return sorted(str(path.relative_to(root)) for path in found if path.is_file())


def arguments(**defaults: Any) -> argparse.Namespace:
    """`--name value` for each default, and `--seed`, which is printed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    return options
