"""A full disk. `--errors 1`: every file operation fails once, with each errno. Else `ROOT/q` is a tiny file system.

Nothing may be lost, half-visible or left over. A process that finds no room keeps what it has, and continues when there
is some.
"""

from __future__ import annotations

import errno
import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from queue_harness import (
    Log,
    Trainer,
    arguments,
    claim_now,
    counting_files,
    drain,
    execute,
    failing_files,
    leftovers,
    replay,
)

from async_grpo.errors import DiskFullError
from async_grpo.queue import WorkerQueue
from async_grpo.queue.names import parse_name

POISON = (3,)


def tiny_disk(root: Path, log_path: Path, jobs: int) -> dict[str, object]:
    """The archive fills the disk; only a checkpoint allows the trainer to trim it."""
    log = Log(log_path)
    trainer = Trainer(root, jobs, log, window=32, steps=1_000_000, watch_workers=False)
    worker = WorkerQueue.open(root, 1, "cpu")
    full: Counter[str] = Counter()
    for turn in range(1_000_000):
        try:
            trainer.submit()
        except DiskFullError:
            full["submit"] += 1
        for claim in claim_now(worker, 4):
            while True:
                try:
                    execute(worker, claim, log)
                    break
                except DiskFullError:
                    full["complete"] += 1
                    assert (root / "queue" / str(claim.name)).exists(), "the claim was lost"
                    check_visible(root)
                    trainer.collect()
                    trainer.checkpoint()
                    trainer.queue.trim_done(80, consumed=trainer.consumed)
        trainer.collect()
        if full["submit"] and turn % 50 == 49:
            trainer.checkpoint()
            trainer.queue.trim_done(80, consumed=trainer.consumed)
        if trainer.done:
            break
    worker.close()
    trainer.queue.close()
    told = replay(log_path, jobs)
    assert told["applied"] == jobs, told
    assert not told["healing"], told
    assert not leftovers(root), leftovers(root)
    assert full.total(), "the disk was never full: give it less room"
    return {"jobs": jobs, "disk_full": full.total(), **full}


def check_visible(root: Path) -> None:
    """Every visible file is whole, and nothing temporary is left."""
    assert not leftovers(root, ["tmp"])
    for path in (root / "queue").iterdir():
        assert parse_name(path.name), path
        assert path.stat().st_size > 100, path


def every_operation_fails(folder: Path) -> dict[str, object]:
    counts: Counter[str] = Counter()
    (folder / "count").mkdir(mode=0o700)
    drain(folder / "count", 4, Log(folder / "count.log"), POISON, files=counting_files(folder / "count", counts))
    cases = 0
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        for at in range(counts.total()):
            root = folder / f"{code}-{at}"
            root.mkdir(mode=0o700)
            log_path = folder / f"{code}-{at}.log"
            log, files = Log(log_path), failing_files(root, at, code, times=1 + at % 2)
            for _ in range(4):  # whoever is hit ends or waits, and starts again
                with suppress(OSError, DiskFullError):
                    drain(root, 4, log, POISON, files=files).checkpoint()
                    break
            told = replay(log_path, 4)
            assert told["applied"] == 3, f"{errno.errorcode[code]} at {at}: {told}"
            assert not told["healing"], f"{errno.errorcode[code]} at {at}: {told}"
            assert not leftovers(root), f"{errno.errorcode[code]} at {at}: {leftovers(root)}"
            cases += 1
    return {"operations": counts.total(), "cases": cases}


def main() -> None:
    options = arguments(errors=0, jobs=200)
    if options.errors:
        print(json.dumps(every_operation_fails(options.root)))
    else:
        print(json.dumps(tiny_disk(options.root / "q", options.root / "log", options.jobs)))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        sys.exit(1)
