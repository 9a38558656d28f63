"""What benchmarks of several processes share: forked ones that are ended, and a wait with a deadline."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def running(count: int, work: Callable[[int], None]) -> Iterator[list[int]]:
    """Forked processes 1 … count, killed at the end."""
    pids = []
    for number in range(1, count + 1):
        pid = os.fork()
        if pid == 0:
            try:
                work(number)
            except BaseException as error:  # noqa: BLE001 - nothing of the parent may run on in the child
                print(f"worker {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        pids.append(pid)
    try:
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def wait_until(condition: Callable[[], bool], pause_s: float = 0.002) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("timed out after 30 s")
        time.sleep(pause_s)
