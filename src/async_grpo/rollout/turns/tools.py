"""Runs the tools that dialogues call, side by side, each for a limited time.

An async tool runs on TRL's own event loop, with those of all other dialogues. Any other runs in a thread: beside all
others if it is marked `thread_safe`, else one call of it at a time (`WaitingLine`). The calls of one message that are
not async run in their order, as in TRL.

Whatever a tool does, its dialogue gets a text: TRL's own for what TRL knows (it raised an exception, it does not exist,
its arguments are wrong), the same for what TRL does not survive (it hangs, exits, or returns what is no text).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from async_grpo.errors import GeneratorError
from async_grpo.formatting import encodable
from async_grpo.log import logger
from async_grpo.rollout.threads import KeptThreads, UserCode
from async_grpo.rollout.turns.calls import Call, Outcome, Refused
from async_grpo.telemetry.activity import activity

MOST_TEXT = 65_536  # characters of a tool's result; a longer one becomes an error with its beginning
SHOWN = 2_000  # characters of a result that is too long
MOST_LEFT_BEHIND = 16  # calls that did not end in time and still run; one more ends the worker


class ToolFailed(Exception):
    """What a dialogue reads of a call that came to nothing."""


class Tools:
    """The tools of all dialogues of a worker. Used on its event loop.

    Args:
        code: by name, runs a tool where it can run: in the main thread if it uses signals.
        timeout_s: of one call.
        at_once: calls that run at a time.
        users_loop: TRL's, on which async tools and rewards run.
    """

    def __init__(
        self, code: Mapping[str, UserCode], *, timeout_s: float, at_once: int = 64, users_loop: Callable[[], Any]
    ) -> None:
        self._code = code
        self._timeout_s = timeout_s
        self._capacity = asyncio.Semaphore(at_once)
        self._users_loop = users_loop
        self._threads = KeptThreads()
        self._lines: dict[Any, WaitingLine] = {}  # by tool
        self._serving: dict[WaitingLine, asyncio.Task[None]] = {}
        self._thread_free: dict[WaitingLine, asyncio.Future[None]] = {}  # of the thread that makes a line's calls now
        self._numbers = itertools.count()
        self._running: dict[int, str] = {}  # calls that have not ended, by number: the tool's name
        self._left_behind: set[int] = set()  # those of them that nobody waits for any more
        self._said: Counter[str] = Counter()

    @property
    def in_time(self) -> int:
        """Calls that run and whose time is not over."""
        return len(self._running.keys() - self._left_behind)

    def check(self) -> None:
        """Raise `GeneratorError` if too many calls will not end: each keeps a thread, and what it holds."""
        stuck = [self._running[number] for number in [*self._left_behind] if number in self._running]
        if len(stuck) > MOST_LEFT_BEHIND:
            names = ", ".join(f"{name} ({count})" for name, count in Counter(stuck).most_common(3))
            raise GeneratorError(
                f"{len(stuck)} tool calls still run after their {self._timeout_s:g} s (--tool-timeout): {names}. "
                "Python cannot stop a thread, so this worker ends and another takes its place. Give the tool a "
                "time-out of its own, or raise --tool-timeout."
            )

    async def run(self, calls: Sequence[Call], owner: set[int] | None = None) -> list[Outcome]:
        """What the calls of one message came to, in order. `owner` gets the numbers of those that run on after it."""
        owner = set() if owner is None else owner
        outcomes: dict[int, Outcome] = {}
        later = {index: call for index, call in enumerate(calls) if call.coroutine is not None}
        try:
            for index, call in enumerate(calls):
                if call.error is not None:
                    outcomes[index] = Outcome(error=Refused(call.error))
                elif call.coroutine is None:
                    outcomes[index] = await self._in_thread(call, owner)
        except BaseException:  # also where no thread can be started
            for call in later.values():
                call.coroutine.close()
            raise
        ended = await asyncio.gather(*(self._on_users_loop(call, owner) for call in later.values()))
        outcomes.update(zip(later, ended, strict=True))
        return [outcomes[index] for index in range(len(calls))]

    def still_running(self, owner: set[int]) -> bool:
        return not owner.isdisjoint(self._running)

    async def _in_thread(self, call: Call, owner: set[int]) -> Outcome:
        if not is_thread_safe(call.tool):
            return await self._in_line(call, owner)
        async with self._capacity:
            number, answer, work = self._as_work(call)
            try:
                self._threads.run(work, name=f"tool {call.name}")
            except RuntimeError as error:  # no thread can be started
                self._refuse(number, answer, error)
            return await self._in_its_time(call, number, answer, owner)

    async def _in_line(self, call: Call, owner: set[int]) -> Outcome:
        tool = getattr(call.tool, "__func__", call.tool)  # of all environments one
        line = self._lines.setdefault(tool, WaitingLine())
        number, answer, work = self._as_work(call)
        waiting = Waiting(work, partial(self._refuse, number, answer))
        line.join(waiting)
        if line not in self._serving:
            self._serving[line] = asyncio.create_task(self._serve(line, call.name))
        try:
            while not answer.done() and (left := waiting.seconds_left(self._timeout_s)) > 0:
                await asyncio.wait([answer], timeout=left)
            return answer.result() if answer.done() else self._given_up(call)
        finally:
            if not answer.done() and not line.leave(waiting):  # it has not begun, or has just ended
                self._running.pop(number, None)
            elif not answer.done() and not self._thread_free[line].done():
                self._thread_free[line].set_result(None)  # another thread makes the calls behind it
            self._note_left_behind(number, owner)

    async def _serve(self, line: WaitingLine, name: str) -> None:
        """Have threads make the calls of a line, one thread at a time, until none waits."""
        try:
            while len(line):
                async with self._capacity:
                    free = self._thread_free[line] = asyncio.get_running_loop().create_future()
                    self._threads.run(partial(_make_calls, line, free), name=f"tool {name}")
                    await free
        except Exception as error:  # noqa: BLE001  # no thread can be started: it belongs to the calls
            line.refuse(error)
        finally:
            del self._serving[line]

    def _refuse(self, number: int, answer: asyncio.Future[Outcome], error: Exception) -> None:
        self._running.pop(number, None)
        if not answer.done():
            answer.set_exception(error)

    def _as_work(self, call: Call) -> tuple[int, asyncio.Future[Outcome], Callable[[], None]]:
        """Number the call; also returns where its outcome will be, and what a thread has to do."""
        number, answer = self._begun(call)
        context = contextvars.copy_context()  # a line makes calls of several groups

        def work() -> None:
            activity.calls_tool(number, call.name)
            outcome = context.run(_outcome, partial(self._code[call.name].call, call.tool, **call.arguments))
            self._ended(number, answer, outcome)

        return number, answer, work

    async def _on_users_loop(self, call: Call, owner: set[int]) -> Outcome:
        with contextlib.closing(_Awaited(call.coroutine, self._users_loop())) as awaited:
            async with self._capacity:
                number, answer = self._begun(call)
                activity.calls_tool(number, call.name)
                awaited.begin(partial(self._ended, number, answer))
                return await self._in_its_time(call, number, answer, owner)

    async def _in_its_time(self, call: Call, number: int, answer: asyncio.Future[Outcome], owner: set[int]) -> Outcome:
        try:
            return await asyncio.wait_for(answer, self._timeout_s)
        except TimeoutError:
            return self._given_up(call)
        finally:
            self._note_left_behind(number, owner)

    def _given_up(self, call: Call) -> Outcome:
        self._said[call.name] += 1
        if self._said[call.name] == 1:
            logger.warning(
                "the tool {} did not return within {:g} s (--tool-timeout); its dialogue continues with an error, its "
                "thread is left behind. More of the same are not shown",
                call.name,
                self._timeout_s,
            )
        text = f"Error: {call.name} did not return within {self._timeout_s:g} s and was given up."
        return Outcome(error=ToolFailed(text))

    def _ended(self, number: int, answer: asyncio.Future[Outcome], outcome: Outcome) -> None:
        self._running.pop(number, None)
        activity.has_called_tool(number)
        _give_from_thread(answer, outcome)

    def _note_left_behind(self, number: int, owner: set[int]) -> None:
        activity.has_called_tool(number)
        if number in self._running:  # timed out, or nobody wants it any more
            self._left_behind.add(number)
            owner.add(number)
        self._left_behind.intersection_update(self._running)

    def _begun(self, call: Call) -> tuple[int, asyncio.Future[Outcome]]:
        number = next(self._numbers)
        self._running[number] = call.name
        return number, asyncio.get_running_loop().create_future()


class _Awaited:
    """A coroutine on the loop of another thread. `close` cancels it, and whether it ever began, it ends."""

    def __init__(self, coroutine: Any, loop: Any) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._task: asyncio.Task[Outcome] | None = None
        self._wanted = True

    def begin(self, ended: Callable[[Outcome], None]) -> None:
        """Have it run. `ended` is called once, in the other thread, also for what was closed before it began."""
        self._loop.call_soon_threadsafe(self._begin, ended)

    def close(self) -> None:
        self._wanted = False
        self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self, ended: Callable[[Outcome], None]) -> None:
        if not self._wanted:  # its time ended while another coroutine blocked the loop
            ended(Outcome(error=ToolFailed("Error: not begun in time.")))
            return
        self._task = self._loop.create_task(_awaited(self._coroutine))
        self._task.add_done_callback(lambda task: self._end(task, ended))

    def _end(self, task: asyncio.Task[Outcome], ended: Callable[[Outcome], None]) -> None:
        self._coroutine.close()  # a task that is cancelled at once has not begun it
        ended(Outcome(error=ToolFailed("Error: cancelled.")) if task.cancelled() else task.result())

    def _cancel(self) -> None:
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()


class Waiting:
    """A call in a line.

    Args:
        make: makes it, and raises nothing.
        refuse: says that nobody will make it.
    """

    def __init__(self, make: Callable[[], None], refuse: Callable[[Exception], None]) -> None:
        self.make, self.refuse = make, refuse
        self._began: float | None = None  # monotonic seconds

    def begin(self) -> None:
        self._began = time.monotonic()

    def seconds_left(self, timeout_s: float) -> float:
        """Seconds that are left of its time, which begins with the call."""
        return timeout_s if self._began is None else self._began + timeout_s - time.monotonic()


class WaitingLine:
    """The calls of one tool that is not thread-safe. Used by the event loop, and by the thread that makes them.

    The event loop runs only between two steps of the engine. If it began each call, one call would be made in a step.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._waiting: deque[Waiting] = deque()
        self._made: Waiting | None = None  # the call that is being made

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, call: Waiting) -> None:
        with self._changing:
            self._waiting.append(call)

    def make(self) -> None:
        """Make the calls that wait now, in their order, up to one that is left behind."""
        for _ in range(len(self._waiting)):
            with self._changing:
                if not self._waiting:
                    return
                call = self._made = self._waiting.popleft()
                call.begin()
            call.make()
            with self._changing:
                if self._made is not call:
                    return
                self._made = None

    def leave(self, call: Waiting) -> bool:
        """Have the line go on without this call; returns whether it is being made, so its thread is left behind."""
        with self._changing:
            if self._made is call:
                self._made = None
                return True
            if call in self._waiting:
                self._waiting.remove(call)
            return False

    def refuse(self, error: Exception) -> None:
        """No call that waits will be made."""
        with self._changing:
            refused, self._waiting = list(self._waiting), deque()
        for call in refused:
            call.refuse(error)


def is_thread_safe(tool: Callable[..., Any]) -> bool:
    """Whether the tool, or the class of its environment, is marked `thread_safe`."""
    owner = getattr(tool, "__self__", None)
    return bool(getattr(tool, "thread_safe", getattr(owner, "thread_safe", False)))


def _give(answer: asyncio.Future[Any], outcome: Any) -> None:
    if not answer.done():
        answer.set_result(outcome)


def _give_from_thread(answer: asyncio.Future[Any], outcome: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
        answer.get_loop().call_soon_threadsafe(_give, answer, outcome)


def _make_calls(line: WaitingLine, free: asyncio.Future[None]) -> None:
    line.make()
    _give_from_thread(free, None)


def _outcome(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(readable(call()))
    except BaseException as error:  # noqa: BLE001  # whatever a tool raises is text for the model
        return Outcome(error=_as_exception(error))


async def _awaited(coroutine: Any) -> Outcome:
    try:
        return Outcome(readable(await coroutine))
    except BaseException as error:  # noqa: BLE001  # an `exit()` would end TRL's loop, a `CancelledError` ours
        return Outcome(error=_as_exception(error))


def _as_exception(error: BaseException) -> Exception:
    """The error, or what a dialogue reads in its place: of one that is no `Exception`, or that has no text."""
    try:
        text = str(error)
        if isinstance(error, Exception):
            fits = len(text) <= MOST_TEXT and text == encodable(text)
            return error if fits else ToolFailed(encodable(text[:SHOWN]))
        return ToolFailed(f"Error: {type(error).__name__}: {encodable(text[:SHOWN])}")
    except BaseException:  # noqa: BLE001  # its `__str__` raised
        return ToolFailed(f"Error: {type(error).__name__}")


def readable(result: Any) -> Any:
    """A result as TRL writes it: its text, or a list of content blocks.

    Raises:
        ToolFailed: it is longer than any dialogue.
    """
    if not isinstance(result, list):
        whole = str(result)
        _check_length(whole)
        return encodable(whole)
    _check_length("".join(filter(None, map(_text_of, result))))
    return [part if (text := _text_of(part)) is None else {**part, "text": encodable(text)} for part in result]


def _text_of(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None


def _check_length(text: str) -> None:
    if len(text) > MOST_TEXT:
        raise ToolFailed(
            f"Error: the result has {len(text):,} characters, and at most {MOST_TEXT:,} can be read. It begins: "
            f"{encodable(text[:SHOWN])}"
        )
