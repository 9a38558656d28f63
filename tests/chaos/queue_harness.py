"""What the fault tests of the queue share: a trainer with checkpoints, an independent log, file systems that fail.

The log is written by `os.write` on an `O_APPEND` file, so that it survives a SIGKILL of its writers, and is read by
`replay`, which knows nothing of the queue: it decides whether every job had its effect once and only once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.queue import Claim, ServerQueue, WorkerQueue
from async_grpo.queue.filesystem import Files, OsFiles
from async_grpo.queue.server import Healing
from async_grpo.records import Job, RolloutGroup

RUN = "chaos"
HERE = Path(__file__).parent


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


def replay(path: Path, total: int) -> dict[str, Any]:
    """Read the log as a trainer that loses what came after its checkpoint when it is killed. Asserts guarantee 1."""
    applied: set[int] = set()
    executions: Counter[int] = Counter()
    healing: dict[str, int] = {}
    given_up: set[int] = set()
    ever_applied: set[int] = set()
    servers = regenerated = 0
    for event in logged(path):
        if event["event"] == "open":
            checkpoint = _expand(event["consumed"])
            assert checkpoint <= applied | given_up, "a checkpoint has what was never applied"
            applied, given_up = checkpoint - given_up, checkpoint & given_up
            servers += 1
        elif event["event"] == "apply":
            assert event["seq"] not in applied, f"job {event['seq']} was applied twice"
            assert event["right"], f"job {event['seq']} was applied with wrong data"
            applied.add(event["seq"])
            ever_applied.add(event["seq"])
            given_up.discard(event["seq"])
        elif event["event"] == "give up":
            given_up.add(event["seq"])
        elif event["event"] == "execute":
            executions[event["seq"]] += 1
            regenerated += event["seq"] in ever_applied
        elif event["event"] == "healing":
            healing = event["counts"]
        elif event["event"] == "crashed":
            raise AssertionError(event["traceback"])
    lost = set(range(total)) - applied - given_up
    assert not lost, f"jobs {sorted(lost)[:9]} were lost"
    return {
        "applied": len(applied),
        "given_up": sorted(given_up),
        "executions": executions.total(),
        "regenerated": regenerated,  # after the trainer had used them: they should have been given back
        "servers": servers,
        "healing": healing,
    }


class Trainer:
    """A server that uses every group once and writes a checkpoint now and then, as the parameter server does."""

    def __init__(
        self,
        root: Path,
        total: int,
        log: Log,
        *,
        window: int = 8,
        steps: int = 3,
        on_checkpoint: Callable[[set[int]], object] = len,
        **opened: Any,
    ) -> None:
        self._checkpoint = root.parent / f"{root.name}.checkpoint"
        self._log, self._total, self._window, self._steps = log, total, window, steps
        self._on_checkpoint = on_checkpoint
        self.consumed = self._load()
        log.write("open", consumed=_ranges(self.consumed))
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
            json.dump(_ranges(self.consumed), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._checkpoint)
        self._on_checkpoint(set(self.consumed))
        self._since_checkpoint = 0

    def _use(self, seq: int) -> None:
        self.consumed.add(seq)
        self._since_checkpoint += 1
        if self._since_checkpoint >= self._steps:
            self.checkpoint()

    def _load(self) -> set[int]:
        with suppress(FileNotFoundError):
            return _expand(json.loads(self._checkpoint.read_text()))
        return set()


def execute(worker: WorkerQueue, claim: Claim, log: Log, work_s: float = 0.0) -> None:
    """Do a job."""
    log.write("execute", seq=claim.job.seq, attempt=claim.attempt, worker=worker.name)
    time.sleep(work_s)
    worker.complete(claim, make_group(claim.job, claim.attempt, worker.name))


def claim_now(worker: WorkerQueue, limit: int) -> list[Claim]:
    """Claim with a look at the directory, whatever the pipe tells."""
    worker._look_at = 0.0
    return worker.claim(limit)


def drain(root: Path, total: int, log: Log, poison: Iterable[int] = (), **opened: Any) -> Trainer:
    """Bring a queue to its end with one trainer and one worker that take turns; poison jobs fail every time."""
    trainer = Trainer(root, total, log, watch_workers=False, **opened)
    with closing(trainer.queue), closing(WorkerQueue.open(root, 1, "cpu", files=opened.get("files"))) as worker:
        _take_turns(trainer, worker, total, log, poison)
    return trainer


def _take_turns(trainer: Trainer, worker: WorkerQueue, total: int, log: Log, poison: Iterable[int]) -> None:
    for _ in range(40 + 10 * total):
        trainer.submit()
        trainer.queue.recover_dead()
        for claim in claim_now(worker, 4):
            if claim.job.seq in poison:
                worker.fail(claim, "poison")
            else:
                execute(worker, claim, log)
        trainer.collect()
        if trainer.done:
            return
    left = sorted(path.name for path in (worker.root / "queue").iterdir())
    raise AssertionError(f"did not drain: {left}")


def leftovers(root: Path, folders: Iterable[str] = ("queue", "tmp")) -> list[str]:
    """Files that must not be there once everything is drained."""
    found = (path for name in folders for path in (root / name).rglob("*"))
    return sorted(str(path.relative_to(root)) for path in found if path.is_file())


class WrappedFiles:
    """`Files` that call `before(operation, path, data)` first."""

    def __init__(self, root: Path, before: Callable[[str, str, bytes], None]) -> None:
        self._files, self._before = OsFiles(root), before

    def names(self, folder: str) -> list[str]:
        self._before("names", folder, b"")
        return self._files.names(folder)

    def read(self, path: str) -> bytes:
        self._before("read", path, b"")
        return self._files.read(path)

    def create(self, path: str, data: bytes) -> None:
        self._before("create", path, data)
        self._files.create(path, data)

    def rename(self, path: str, to: str) -> None:
        self._before("rename", path, to.encode())
        self._files.rename(path, to)

    def sync(self, path: str) -> None:
        self._before("sync", path, b"")
        self._files.sync(path)

    def unlink(self, path: str) -> None:
        self._before("unlink", path, b"")
        self._files.unlink(path)

    def exists(self, path: str) -> bool:
        self._before("exists", path, b"")
        return self._files.exists(path)

    def make_folder(self, path: str) -> None:
        self._before("make_folder", path, b"")
        self._files.make_folder(path)

    def close(self) -> None:
        """A test shares one of these between a server and a worker."""

    def really_close(self) -> None:
        """What the kernel does for a process that was killed."""
        self._files.close()


def killing_files(root: Path, at: int, *, half: bool = False) -> Files:
    """SIGKILL of this process before its operation number `at`; with `half`, in the middle of it if it writes."""
    count = -1

    def before(operation: str, path: str, data: bytes) -> None:
        nonlocal count
        count += 1
        if count == at:
            if half and operation == "create":
                (root / path).write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return WrappedFiles(root, before)


def failing_files(root: Path, at: int, code: int, *, times: int = 1) -> Files:
    """`OSError(code)` instead of the operations `at` … `at + times - 1`; a write fails half-way."""
    count = -1

    def before(operation: str, path: str, data: bytes) -> None:
        nonlocal count
        count += 1
        if at <= count < at + times:
            if operation == "create":
                (root / path).write_bytes(data[: len(data) // 2])
            raise OSError(code, os.strerror(code), path)

    return WrappedFiles(root, before)


def counting_files(root: Path, counts: Counter[str]) -> Files:
    return WrappedFiles(root, lambda operation, path, data: counts.update([operation]))


def forked(role: Callable[[], None], log: Log) -> int:
    """Run `role` in a child; an exception in it goes into the log."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        role()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing of the parent may run on in the child
        log.write("crashed", traceback=traceback.format_exc())
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def arguments(**defaults: Any) -> argparse.Namespace:
    """`--name value` for each default, `--seed` (printed), `--mutant` (a bug of `queue_mutants` to seed)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--mutant", default="")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    if options.mutant:
        from queue_mutants import MUTANTS

        MUTANTS[options.mutant]()
    return options


def _ranges(numbers: set[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    return ranges


def _expand(ranges: list[list[int]]) -> set[int]:
    return {number for begin, end in ranges for number in range(begin, end)}
