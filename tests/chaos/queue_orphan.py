"""A worker forks a child that outlives it, in every way a library may do so; its job must be free anyway."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from queue_harness import RUN, Log, arguments, forked, make_job

from async_grpo.queue import ServerQueue, WorkerQueue


def by_python() -> int:
    """`os.fork`, as multiprocessing does."""
    return os.fork()


def by_library() -> int:
    """`fork` of the C library: no hook of Python runs in the child."""
    return int(ctypes.PyDLL(None).fork())


def by_exec() -> int:
    """A program, started as `subprocess` does."""
    return subprocess.Popen(["sleep", "120"], close_fds=False).pid


def worker(root: Path, told: int, fork: Callable[[], int]) -> None:
    queue = WorkerQueue.open(root, 1, "cpu")
    assert queue.claim(1)
    orphan = fork()
    if orphan == 0:
        time.sleep(120)
        os._exit(0)
    os.write(told, str(orphan).encode())
    time.sleep(120)


def case(root: Path, log: Log, fork: Callable[[], int], deadline_s: float) -> float:
    """Seconds from the worker's death to its job being pending again."""
    server = ServerQueue.open(root, RUN)
    server.submit(make_job(0))
    listen, told = os.pipe()
    pid = forked(lambda: worker(root, told, fork), log)
    orphan = int(os.read(listen, 20))
    try:
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        os.waitpid(pid, 0)
        while server.counts().pending == 0:
            assert time.monotonic() - started < deadline_s, f"the orphan of {fork.__name__} keeps the job of its parent"
            time.sleep(0.001)
        os.kill(orphan, 0)  # it is alive
        return time.monotonic() - started
    finally:
        os.kill(orphan, signal.SIGKILL)
        server.close()


def main() -> None:
    options = arguments(deadline=20.0)
    log = Log(options.root / "log")
    forks = (by_python, by_library, by_exec)
    seconds = {fork.__name__: case(options.root / fork.__name__, log, fork, options.deadline) for fork in forks}
    print(json.dumps({name: round(value, 4) for name, value in seconds.items()}))


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        sys.exit(1)
