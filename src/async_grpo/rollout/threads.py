"""Threads that are kept for the next task: starting a thread, and its first tensors, can take longer than a task.

They are daemons, unlike the threads of `concurrent.futures`: a reward or tool that hangs does not keep the process from
ending. Python stops a daemon thread wherever it is, and if that is inside torch, the process aborts. Call
`wait_for_tasks` before exiting. Tokenizers are not made for threads: `let_threads_share_tokenizers`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

KEEP_S = 60.0  # a thread without a task ends after this many seconds


_unfinished: Counter[str] = Counter()  # tasks by name, of every `KeptThreads` of the process
_task_ended = threading.Condition()


def wait_for_tasks(timeout_s: float) -> list[str]:
    """Wait until no task runs in any kept thread, at most `timeout_s`; returns the names of those that still do."""
    deadline = time.monotonic() + timeout_s
    with _task_ended:
        while _unfinished and (left := deadline - time.monotonic()) > 0:
            _task_ended.wait(left)
        return sorted(_unfinished.elements())


def _ended(name: str) -> None:
    with _task_ended:
        _unfinished[name] -= 1
        if not _unfinished[name]:
            del _unfinished[name]
        _task_ended.notify_all()


class KeptThreads:
    """Runs every task at once, in a thread that has nothing to do or in a new one."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        self._free = threading.Semaphore(0)  # threads that wait, less tasks that are on their way to one

    def run(self, task: Callable[[], None], name: str) -> None:
        """Run `task` in a thread that is called `name` meanwhile. May be called from any thread.

        Raises:
            RuntimeError: no thread can be started; the task will not run.
        """
        if not self._free.acquire(blocking=False):
            threading.Thread(target=self._serve, daemon=True).start()
        with _task_ended:
            _unfinished[name] += 1
        self._tasks.put((name, task))

    def _serve(self) -> None:
        while True:
            try:
                name, task = self._tasks.get(timeout=KEEP_S)
            except Empty:
                if self._free.acquire(blocking=False):
                    return
                continue  # a task is on its way
            threading.current_thread().name = name
            try:
                task()
            finally:
                _ended(name)
            del task  # what it holds is not to be kept until the next one
            threading.current_thread().name = "waits for a task"
            self._free.release()


_encoding = threading.RLock()


def let_threads_share_tokenizers() -> None:
    """Have this process encode one text or batch at a time, whatever the tokenizer. Harmless to call twice.

    A tokenizer of transformers first stores in itself how to pad and truncate, and then encodes. A reward model that
    pads in one thread would have the prompts padded that another thread encodes, or either would end with an error.
    """
    from transformers import PreTrainedTokenizerFast

    encode = PreTrainedTokenizerFast._encode_plus
    if hasattr(encode, "__wrapped__"):
        return

    @functools.wraps(encode)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _encoding:
            return encode(self, *args, **kwargs)

    PreTrainedTokenizerFast._encode_plus = alone
