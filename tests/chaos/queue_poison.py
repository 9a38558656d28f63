"""Poison jobs that kill whichever worker has them: exactly those are given up, jobs claimed with them are spared.

Prints a summary as JSON. Workers claim three jobs at a time, so a poison job always has company at first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from queue_harness import Log, Trainer, arguments, claim_now, execute, forked, leftovers, replay

from async_grpo.queue import WorkerQueue

JOBS, POISON = 24, {3, 4, 11, 12, 20}


def worker(root: Path, log: Log, number: int) -> None:
    queue = WorkerQueue.open(root, number, "cpu")
    while True:
        for claim in claim_now(queue, 3):
            if claim.job.seq in POISON:
                os.kill(os.getpid(), signal.SIGKILL)
            execute(queue, claim, log)
        queue.wait(0.1)


def main() -> None:
    options = arguments(deadline=60.0)
    root, log = options.root / "q", Log(options.root / "log")
    trainer = Trainer(root, JOBS, log, window=JOBS)
    trainer.submit()
    workers: dict[int, int] = {}
    deaths = 0
    end = time.monotonic() + options.deadline
    while not trainer.done:
        if time.monotonic() > end or deaths > 3 * len(POISON):
            for pid in workers.values():
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"not drained in {options.deadline:.0f} s, after {deaths} deaths")
        for number in (1, 2):
            if number in workers and os.waitpid(workers[number], os.WNOHANG)[0]:
                del workers[number]
                deaths += 1
            if number not in workers:
                workers[number] = forked(lambda number=number: worker(root, log, number), log)
        if not trainer.collect():
            trainer.queue.wait(0.02)
    for pid in workers.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    trainer.queue.close()
    told = replay(options.root / "log", JOBS)
    assert told["given_up"] == sorted(POISON), told
    assert told["applied"] == JOBS - len(POISON), told
    assert not told["healing"], told
    WorkerQueue.open(root, 1, "cpu").close()
    WorkerQueue.open(root, 2, "cpu").close()
    assert not leftovers(root), leftovers(root)
    print(json.dumps({**told, "deaths": deaths}))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        sys.exit(1)
