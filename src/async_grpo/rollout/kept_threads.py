"""Threads that wait for their next task: starting one, and the first tensors that it makes, outlast many a task.

They are daemons, which those of `concurrent.futures` are not: a user's reward or tool that hangs does not keep the
process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

KEEP_S = 60.0  # a thread that had nothing to do for so long ends


class KeptThreads:
    """Runs every task at once, in a thread that has nothing to do or in a new one."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        self._free = threading.Semaphore(0)  # threads that wait, less tasks that are on their way to one

    def run(self, task: Callable[[], None], name: str) -> None:
        """Run `task` in a thread that is called `name` meanwhile. May be called from any thread."""
        self._tasks.put((name, task))
        if not self._free.acquire(blocking=False):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                name, task = self._tasks.get(timeout=KEEP_S)
            except Empty:
                if self._free.acquire(blocking=False):
                    return
                continue  # a task is on its way
            threading.current_thread().name = name
            task()
            del task  # what it holds is not to be kept until the next one
            threading.current_thread().name = "waits for a task"
            self._free.release()
