"""Runs the calls of an agent beside the worker's loop: an async one on an event loop of its own, any other in a thread.

Each has the time of `--tool-timeout` between two requests, before the first, and behind the last answer.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from typing import TYPE_CHECKING, Any

from aiohttp import ServerDisconnectedError

from async_grpo.errors import GeneratorError
from async_grpo.rollout.failures import causes_of
from async_grpo.rollout.threads import refusing_signals
from async_grpo.rollout.turns.asks import as_exception
from async_grpo.rollout.turns.calls import Outcome
from async_grpo.rollout.turns.whole import Threads

if TYPE_CHECKING:
    from async_grpo.setup.openai_harness import Agent, Endpoint

_HTTPX_DISCONNECTED = "RemoteProtocolError"  # httpx is installed with `openai` only
MOST_LEFT_BEHIND = 16  # calls that did not end in time and still run; one more ends the worker


class Agents:
    """The calls of one agent. Used on the worker's loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent: Any = agent
        self._is_async = any(map(inspect.iscoroutinefunction, (agent, getattr(agent, "__call__", None))))  # noqa: B004
        self._threads = Threads()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()
        self._running: set[int] = set()  # calls in threads
        self._waited_for: set[int] = set()  # those of them that have time left

    def start(self, prompt: Any, endpoint: Endpoint) -> asyncio.Future[Outcome]:
        """What the call comes to. To cancel it ends an async call; a thread is left behind."""
        if self._is_async:
            return asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self._awaited(prompt, endpoint), self._own_loop())
            )
        return asyncio.ensure_future(self._in_thread(prompt, endpoint))

    def check(self, timeout_s: float) -> None:
        """Raise `GeneratorError` if too many calls will not end: each keeps a thread, and what it holds."""
        if (left_behind := len(self._running - self._waited_for)) > MOST_LEFT_BEHIND:
            raise GeneratorError(
                f"{left_behind} calls of the agent still run after their {timeout_s:g} s without a request "
                "(--tool-timeout). Python cannot stop a thread, so this worker ends and another takes its place. Give "
                "what the agent waits for a time-out of its own, or raise --tool-timeout."
            )

    async def _in_thread(self, prompt: Any, endpoint: Endpoint) -> Outcome:
        number = next(self._numbers)

        def work() -> Outcome:
            try:
                return self._called(prompt, endpoint)
            finally:
                self._running.discard(number)

        self._waited_for.add(number)
        self._running.add(number)
        try:
            return await self._threads.run(work, name="agent")
        finally:
            self._waited_for.discard(number)

    def _called(self, prompt: Any, endpoint: Endpoint) -> Outcome:
        try:
            with refusing_signals():
                return Outcome(self._agent(prompt, endpoint))
        except BaseException as error:  # noqa: BLE001  # of the user's code: it belongs to the episode
            return Outcome(error=as_exception(error))

    async def _awaited(self, prompt: Any, endpoint: Endpoint) -> Outcome:
        try:
            return Outcome(await self._agent(prompt, endpoint))
        except BaseException as error:  # noqa: BLE001  # an `exit()` would end the loop
            return Outcome(error=as_exception(error))

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        return self._loop


def is_lost_connection(error: BaseException, base_url: str) -> bool:
    """Whether an agent's error is that its connection to the endpoint broke.

    An error that names another address, such as that of a search engine, is not. Where a client waited for too long, it
    hung up itself.
    """
    causes = causes_of(error)
    if any(not url.startswith(base_url) for url in filter(None, map(_url, causes))):
        return False
    return any(
        isinstance(cause, (ConnectionError, ServerDisconnectedError)) or type(cause).__name__ == _HTTPX_DISCONNECTED
        for cause in causes
    )


def _url(error: BaseException) -> str | None:
    """The address of the request that failed, as `openai`, httpx and requests note it."""
    try:
        return str(error.request.url)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # httpx: it was not noted
        return None
