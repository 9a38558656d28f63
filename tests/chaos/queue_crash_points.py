"""SIGKILL before every file operation of a small run, and again during its recovery. Prints a summary as JSON.

Two kinds of crash. `both`: server and worker are one process, which is killed before operation n (and in the middle
of it, if it writes a file); its recovery is killed before operation m; a third process has to finish. `worker`: only
the worker is killed, the server lives on. One job is poison: it fails every time and must be the only one given up.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path

from queue_harness import (
    Log,
    Trainer,
    arguments,
    claim_now,
    counting_files,
    drain,
    execute,
    exit_code,
    forked,
    killing_files,
    leftovers,
    replay,
)

from async_grpo.queue import WorkerQueue
from async_grpo.queue.filesystem import Files, OsFiles

JOBS, POISON = 4, (3,)


def worker_life(root: Path, log: Log, files: Files) -> None:
    """Everything that a worker does: completes, hands back, fails until a job is given up."""
    worker = WorkerQueue.open(root, 1, "cpu", files=files)
    first, second, *_ = claim_now(worker, 2)
    execute(worker, first, log)
    worker.hand_back(second)
    for _ in range(12):
        for claim in claim_now(worker, 4):
            if claim.job.seq in POISON:
                worker.fail(claim, "poison")
            else:
                execute(worker, claim, log)


def crash_both(root: Path, log: Log, first: int, second: int | None, *, half: bool) -> None:
    """Kill the run at `first`, its recovery at `second`; then finish and check."""
    for at in (first, second):
        if at is not None:
            code = exit_code(forked(lambda at=at: full_life(root, log, killing_files(root, at, half=half)), log))
            assert code in (0, -signal.SIGKILL), code
    assert exit_code(forked(lambda: full_life(root, log, OsFiles(root)), log)) == 0


def full_life(root: Path, log: Log, files: Files) -> None:
    drain(root, JOBS, log, POISON, files=files, steps=1 + int(root.parent.name) % 3).checkpoint()


def crash_worker(root: Path, log: Log, at: int, *, half: bool) -> None:
    trainer = Trainer(root, JOBS, log, watch_workers=False)
    trainer.submit()
    code = exit_code(forked(lambda: worker_life(root, log, killing_files(root, at, half=half)), log))
    assert code in (0, -signal.SIGKILL), code
    if at % 2:  # either the server recovers its jobs, or its successor does
        trainer.queue.recover_dead()
    for _ in range(20):
        assert exit_code(forked(lambda: worker_life_after(root, log), log)) == 0
        trainer.collect()
        if trainer.done:
            break
    assert trainer.done, "did not drain"
    trainer.queue.close()


def worker_life_after(root: Path, log: Log) -> None:
    worker = WorkerQueue.open(root, 1, "cpu")
    for claim in claim_now(worker, 4):
        if claim.job.seq in POISON:
            worker.fail(claim, "poison")
        else:
            execute(worker, claim, log)
    worker.close()


def operations(root: Path, log: Log) -> tuple[int, int]:
    """How many file operations an undisturbed run makes: with both sides in one process, and the worker's alone."""
    root.mkdir(mode=0o700)
    both: Counter[str] = Counter()
    trainer = drain(root / "both", JOBS, log, POISON, files=_made(root / "both", both))
    trainer.queue.close()
    alone: Counter[str] = Counter()
    trainer = Trainer(root / "alone", JOBS, log, watch_workers=False)
    trainer.submit()
    code = exit_code(forked(lambda: _report(root, log, alone), log))
    assert code == 0
    trainer.queue.close()
    return both.total(), int((root / "count").read_text())


def _made(root: Path, counts: Counter[str]) -> Files:
    root.mkdir(mode=0o700)
    return counting_files(root, counts)


def _report(root: Path, log: Log, counts: Counter[str]) -> None:
    worker_life(root / "alone", log, counting_files(root / "alone", counts))
    (root / "count").write_text(str(counts.total()))


def main() -> None:
    options = arguments(every=1, worker_every=1, recovery=15)
    undisturbed = Log(options.root / "undisturbed.log")
    both, alone = operations(options.root / "undisturbed", undisturbed)
    cases = [
        ("both", first, second, half)
        for first in range(both)
        for second in [None, *range(options.recovery)]
        for half in (False, True)
    ]
    chosen = cases[options.seed % options.every :: options.every]
    cases = [("worker", at, None, half) for at in range(alone) for half in (False, True)]
    chosen += cases[options.seed % options.worker_every :: options.worker_every]
    bad = []
    for number, (kind, first, second, half) in enumerate(chosen):
        root = options.root / str(number) / "q"
        root.parent.mkdir()
        root.mkdir(mode=0o700)
        log_path = root.parent / "log"
        log = Log(log_path)
        try:
            if kind == "both":
                crash_both(root, log, first, second, half=half)
            else:
                crash_worker(root, log, first, half=half)
            check(root, log_path, kills=1 if second is None else 2)
        except AssertionError as error:
            bad.append(f"{kind} {first} {second} {half}: {error}")
            if options.mutant:  # caught
                break
    told = {"operations": both, "worker_operations": alone, "cases": len(chosen), "bad": len(bad)}
    print(json.dumps(told))
    if bad:
        print("FAILED:", *bad[:5], sep="\n", file=sys.stderr)
        sys.exit(1)


def check(root: Path, log_path: Path, kills: int) -> None:
    told = replay(log_path, JOBS)
    assert told["applied"] == JOBS - len(POISON), told
    assert told["given_up"] == list(POISON), told
    assert not told["healing"], told["healing"]
    assert not told["regenerated"], "a group that had been used was generated again"
    assert told["executions"] <= JOBS - len(POISON) + kills, f"{told['executions']} executions"
    WorkerQueue.open(root, 1, "cpu").close()
    assert not leftovers(root), leftovers(root)
    for failed in (root / "quarantine").glob("*.safetensors"):
        reason = failed.with_suffix(".reason")
        assert reason.exists() and reason.read_text(), "set aside without its reason"


if __name__ == "__main__":
    main()
