"""SIGSTOP of a worker: slow is not dead, nobody takes its job. When the launcher kills it, the job is free at once.

Prints the times from kill to pending, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from queue_harness import RUN, Log, arguments, forked, make_job

from async_grpo.queue import ServerQueue, WorkerQueue

DEADLINE_S = 60.0


def worker(root: Path, number: int, told: int) -> None:
    queue = WorkerQueue.open(root, number, "cpu")
    assert queue.claim(1)
    os.write(told, b"1")
    time.sleep(120)


def main() -> None:
    options = arguments(workers=40, attempts=100)
    root, log = options.root / "q", Log(options.root / "log")
    server = ServerQueue.open(root, RUN, max_attempts=options.attempts)
    listen, told = os.pipe()
    seconds = []
    for number in range(1, options.workers + 1):
        server.submit(make_job(number))
        pid = forked(lambda number=number: worker(root, number, told), log)
        os.read(listen, 1)
        os.kill(pid, signal.SIGSTOP)
        before = server.counts()
        assert server.recover_dead() == [], "a job was taken from a stopped worker"
        assert server.counts() == before
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        while server.counts().processing >= before.processing:
            assert time.monotonic() - started < DEADLINE_S, "the job of a killed worker is still its own"
            time.sleep(0.0005)
        seconds.append(time.monotonic() - started)
        os.waitpid(pid, 0)
    server.close()
    seconds.sort()
    told_ms = [round(1000 * value, 2) for value in (seconds[0], seconds[len(seconds) // 2], seconds[-1])]
    print(json.dumps({"workers": options.workers, "recovered": len(seconds), "kill_to_pending_ms": told_ms}))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        sys.exit(1)
