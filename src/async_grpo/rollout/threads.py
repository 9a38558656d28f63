"""The threads of a worker beside its loop: kept ones for tasks, and the main one for code that runs in no other.

Threads are kept for the next task, because starting one, and its first tensors, can take longer than a task. They are
daemons, unlike the threads of `concurrent.futures`: a reward or tool that hangs does not keep the process from ending.
Python stops a daemon thread wherever it is, and if that is inside torch, the process aborts. Call `wait_for_tasks`
before exiting. Tokenizers are not made for threads: `let_threads_share_tokenizers`.

Only the main thread may set a handler of a signal, and time-outs made of `signal.alarm` (math-verify's) need one.
Plain TRL calls reward functions and tools in the main thread. So a worker's loop runs in a thread of its own, and the
rewards and tools that need the main thread run there, one at a time, beside the engine. All others stay in threads,
where slow ones do not wait for each other.

A child process would not do: rewards share objects with the worker (environments, models on its GPU, closures).
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from async_grpo.errors import PeerDiedError, UnsupportedError
from async_grpo.log import logger
from async_grpo.setup.process import leave_at_once
from async_grpo.setup.replaced import instead

P = ParamSpec("P")
T = TypeVar("T")

KEEP_S = 60.0  # a thread without a task ends after this many seconds
LOOK_S = 0.5  # the main thread looks this often whether the loop's thread is alive
_LOOKS_AT_ITS_THREAD = "trl.rewards.accuracy_rewards"  # math-verify's time-outs, where it is the main one
ENDING_S = 2.0  # that a call in the main thread is given once the loop has ended
_unfinished: list[str] = []  # names of tasks, of every `KeptThreads` of the process
_task_ended = threading.Condition()


def wait_for_tasks(timeout_s: float) -> list[str]:
    """Wait until no task runs in any kept thread, at most `timeout_s`; returns the names of those that still do."""
    deadline = time.monotonic() + timeout_s
    with _task_ended:
        while _unfinished and (left := deadline - time.monotonic()) > 0:
            _task_ended.wait(left)
        return sorted(_unfinished)


class KeptThreads:
    """Runs every task at once, in a thread that has nothing to do or in a new one."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        self._free = threading.Semaphore(0)  # threads that wait, less tasks that are on their way to one

    def run(self, task: Callable[[], None], name: str) -> None:
        """Run `task` in a thread that is called `name` meanwhile, in this context. May be called from any thread.

        Raises:
            RuntimeError: no thread can be started; the task will not run.
        """
        if not self._free.acquire(blocking=False):
            threading.Thread(target=self._serve, daemon=True).start()
        with _task_ended:
            _unfinished.append(name)
        self._tasks.put((name, functools.partial(contextvars.copy_context().run, task)))

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
                del task  # what it holds may be tensors, which go before the process may end
                with _task_ended:
                    _unfinished.remove(name)
                    _task_ended.notify_all()
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


class _RefusedThread(threading.local):
    count = 0  # how often this thread was not allowed to set a handler of a signal


_refused = _RefusedThread()

_CANNOT_USE_SIGNALS = (
    "A rollout_func, reset() of an environment, or an override of the trainer's generation wanted to use signals (a "
    "time-out, perhaps). Only the main thread may, and workers run this code in other threads. Take a time-out without "
    "signals, or use them in tools and reward functions, which may."
)
_said: list[str] = []  # it is logged once


class MainThread:
    """Runs the calls of other threads in the main thread, while it has nothing else to do."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changing = threading.Lock()
        self._serving = False
        self._left = threading.Event()

    def serve_while(self, work: Callable[[], None]) -> None:
        """Do `work` in another thread, and the calls of `run` in this one until it ends. Raises what `work` raised."""
        ended: Future[None] = Future()
        context = contextvars.copy_context()  # what libraries keep there, they were given in this thread
        thread = threading.Thread(target=context.run, args=(self._work, work, ended), name="worker loop", daemon=True)
        self._left.clear()
        self._serving = True
        with _refusals_are_counted():
            try:
                thread.start()
                while (call := self._next(thread)) is not None:
                    call()
            finally:
                self._left.set()
                self._refuse_calls()
        thread.join(ENDING_S)  # it may still let go of tensors, and the process would abort if it exited meanwhile
        ended.result()

    def run(self, function: Callable[[], T]) -> T:
        """The result of `function`, called in the main thread, in this context.

        Raises:
            PeerDiedError: the worker ends.
        """
        if threading.current_thread() is threading.main_thread():
            return function()
        result: Future[T] = Future()
        with self._changing:
            if not self._serving:
                raise PeerDiedError("The worker ends: its main thread does no more calls.")
            self._calls.put(
                functools.partial(settle, functools.partial(contextvars.copy_context().run, function), result)
            )
        return result.result()  # the main thread answers every call, at the latest when it ends

    def _work(self, work: Callable[[], None], ended: Future[None]) -> None:
        settle(work, ended)
        self._calls.put(None)
        if not self._left.wait(ENDING_S):
            logger.warning("the worker ends before a reward or tool in its main thread: not done in {:g} s", ENDING_S)
            error = ended.exception()
            if error is not None:
                traceback.print_exception(error)
            leave_at_once(0 if error is None else 1)

    def _next(self, thread: threading.Thread) -> Callable[[], None] | None:
        while True:
            try:
                return self._calls.get(timeout=LOOK_S)  # the handlers of our own signals run meanwhile
            except Empty:
                if not thread.is_alive():
                    return None

    def _refuse_calls(self) -> None:
        with self._changing:
            self._serving = False
        while not self._calls.empty():
            call = self._calls.get()
            if isinstance(call, functools.partial):
                call.args[1].set_exception(PeerDiedError("The worker ends."))


main_thread = MainThread()


class UserCode:
    """Code of the user's that runs in the caller's thread, or in the main one from the first call on that needs it.

    That call is repeated there. What it has done by then is done twice.

    Args:
        name: of the code, for the log.
        in_main: it is known to need the main thread.
    """

    def __init__(self, name: str, *, in_main: bool = False) -> None:
        self._name = name
        self._in_main = in_main

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(function, *args, **kwargs)
        if self._in_main:
            return main_thread.run(call)
        before = _refused.count
        try:
            result = call()
        except BaseException:
            if _refused.count == before:
                raise
        else:
            if _refused.count == before:
                return result
        _refused.count = before
        if not self._in_main:
            self._in_main = True
            logger.info(
                "{} use signals (a time-out, perhaps): called in the worker's main thread from now on", self._name
            )
        return main_thread.run(call)


@contextmanager
def refusing_signals() -> Iterator[None]:
    """For code that waits for tokens, so that the main thread is not for it: say so if it wants to use signals.

    Raises:
        UnsupportedError: it failed after Python had not let it set a handler.
    """
    before = _refused.count
    try:
        yield
    except Exception as error:
        if _refused.count == before:
            raise
        raise UnsupportedError(f"{type(error).__name__}: {error}. {_CANNOT_USE_SIGNALS}") from error
    if _refused.count > before and not _said:
        _said.append(_CANNOT_USE_SIGNALS)
        logger.warning("{}", _CANNOT_USE_SIGNALS)


def asks_for_main_thread(reward: Any) -> bool:
    """Whether a reward is one of TRL's that look which thread they are in: elsewhere they have no time-outs."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return getattr(reward, "__module__", None) == _LOOKS_AT_ITS_THREAD


def settle(function: Callable[[], T], result: Future[T]) -> None:
    """Give a future what the function returns or raises."""
    try:
        result.set_result(function())
    except BaseException as error:  # noqa: BLE001  # of the user's code: it belongs to the caller
        result.set_exception(error)


@contextmanager
def _refusals_are_counted() -> Iterator[None]:
    """Count, by thread, how often Python refuses to set a handler: a library may catch the error and say nothing."""
    module: Any = importlib.import_module("_signal")  # `signal.signal` calls it by this name
    original = module.signal

    def counting(number: int, handler: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            _refused.count += 1
        return original(number, handler)

    with instead(module, signal=counting):
        yield
