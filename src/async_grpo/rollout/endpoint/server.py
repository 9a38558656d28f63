"""The HTTP side: a free port of 127.0.0.1, and a key for each episode that is open.

It runs on an event loop and a thread of its own, so that an agent that blocks is still answered. What a request asks is
answered on the worker's loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from async_grpo.formatting import one_line
from async_grpo.log import logger
from async_grpo.rollout.endpoint.protocol import (
    FAILED_WITH_ITS_GROUP,
    MOST_BYTES,
    Answer,
    Request,
    RequestRefusal,
    chunks,
    completion,
    no_episode,
    read_request,
)

if TYPE_CHECKING:
    from async_grpo.rollout.endpoint.episode import Episode

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOST = "127.0.0.1"
START_S = 30.0
ANSWER_S = 4 * 3600.0  # for one answer; the process that samples it is the same, so its death ends this one
MOST_FAILED = 1024  # whose errors are remembered, for what their agents still ask
SAY_AT_MOST = 3  # refusals of one kind that are logged
_QUIET = logging.Logger("endpoint", logging.CRITICAL)  # any user of the machine can send what is not HTTP
_RETRIES = "x-stainless-retry-count"  # how often the `openai` client has sent a request before
_HEADERS = {"x-should-retry": "false"}  # the `openai` client would ask again for what is refused
KEY_S = 30.0  # for a connection to show a key
MOST_STRANGERS = 64
_CONNECTS_S = 0.01  # by then a connection has its transport
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _UID = 1, 7  # columns
Address = tuple[str, int]


class EndpointServer:
    """Answers `POST /v1/chat/completions`. Episodes live on the worker's `loop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._episodes: dict[bytes, Episode] = {}  # by a hash of the key, which nobody can time
        self._failed: dict[bytes, str] = {}  # episodes that ended with another's error, and the error
        self._started: Future[str] = Future()
        self._said: Counter[str] = Counter()

    def start(self) -> str:
        """Its base URL. The server ends with the process."""
        threading.Thread(target=lambda: asyncio.run(self._run()), name="endpoint", daemon=True).start()
        return self._started.result(START_S)

    def open(self, episode: Episode) -> str:
        """The key of an episode."""
        key = f"episode-{secrets.token_urlsafe(24)}"
        self._episodes[_hashed(key)] = episode
        return key

    def close(self, key: str) -> None:
        episode = self._episodes.pop(_hashed(key), None)
        if episode is not None and episode.cause:
            self._failed[_hashed(key)] = episode.cause
            while len(self._failed) > MOST_FAILED:
                self._failed.pop(next(iter(self._failed)), None)

    async def _run(self) -> None:
        application = web.Application(client_max_size=MOST_BYTES, middlewares=[self._refusing])
        application.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, logger=_QUIET, auto_decompress=False
        )
        try:
            await runner.setup()
            assert runner.server is not None
            self._doors, loop = Doors(runner.server), asyncio.get_running_loop()
            listening = await loop.create_server(self._doors, HOST, 0)
            self._started.set_result(f"http://{HOST}:{listening.sockets[0].getsockname()[1]}/v1")
        except BaseException as error:
            self._started.set_exception(error)
            raise
        await asyncio.Event().wait()

    @web.middleware
    async def _refusing(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error has OpenAI's form."""
        try:
            return await handler(request)
        except RequestRefusal as error:
            refusal = error
        except web.HTTPException as error:
            asked = one_line(f"{request.method} {request.path}")
            what = f"{asked} is not answered here, only POST /v1/chat/completions: {error.reason}"
            refusal = RequestRefusal(what, code="unknown_url", status=error.status)
        except ConnectionError:  # the client has gone
            raise
        except Exception as error:  # noqa: BLE001  # such as a body that is not HTTP
            what = f"The request cannot be answered: {type(error).__name__}: {error}"
            refusal = RequestRefusal(what, code="server_error", status=500)
        self._say(refusal)
        return web.json_response(refusal.body(), status=refusal.status, headers=_HEADERS)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        episode = self._episode_of(http)
        self._doors.let_in(http)
        try:
            is_retry = http.headers.get(_RETRIES, "0") != "0"
            request = read_request(await _body(http), episode.rules, is_retry=is_retry)
        except RequestRefusal as refusal:
            self._loop.call_soon_threadsafe(episode.refuse, refusal)
            raise
        answer = await self._answer(episode, request)
        model, number = episode.rules.model, f"{episode.number}_{secrets.token_hex(4)}"
        if not request.stream:
            return web.json_response(completion(answer, request, model=model, number=number))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(http)
        for chunk in chunks(answer, request, model=model, number=number):
            await response.write(chunk.encode())
        return response

    async def _answer(self, episode: Episode, request: Request) -> Answer:
        """A client that hangs up does not end the sampling: the same request gets its answer."""
        sampled = asyncio.run_coroutine_threadsafe(episode.answer(request), self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(sampled), ANSWER_S)
        except asyncio.CancelledError:
            episode.lost = True
            raise
        except RequestRefusal:
            raise
        except Exception as error:
            raise RequestRefusal(
                f"No answer could be sampled: {type(error).__name__}: {error}", code="server_error", status=500
            ) from error

    def _episode_of(self, http: web.Request) -> Episode:
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        episode = self._episodes.get(_hashed(key.strip())) if scheme.lower() == "bearer" else None
        if episode is None:
            raise no_episode(self._failed.get(_hashed(key.strip()), ""))
        return episode

    def _say(self, refusal: RequestRefusal) -> None:
        self._said[refusal.code] += 1
        if refusal.code == FAILED_WITH_ITS_GROUP:  # the first error of the group is the one to be told
            logger.debug("the endpoint refused a request ({}): {}", refusal.code, refusal)
        elif not refusal.ends and self._said[refusal.code] <= SAY_AT_MOST:
            logger.warning("the endpoint refused a request ({}): {}", refusal.code, refusal)


async def _body(http: web.Request) -> bytes:
    try:
        return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestRefusal(
            f"The request has more than {MOST_BYTES:,} bytes, and no dialogue is so long. Shorten what goes into its "
            "messages.",
            code="request_too_large",
            status=413,
            ends=True,
        ) from error


def _hashed(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=16).digest()


class Doors:
    """Makes the protocol of each new connection of a server, on 127.0.0.1. Used on the server's event loop.

    Any user of the machine can open one. Until it has shown the key of an episode, it is a stranger's. Those of other
    users get little of the worker: a short time, and few connections. Those of this user stay, however late they show
    their key: an agent of a busy machine is slow. TCP has no credentials of its peer, so the kernel's table of
    connections says whose they are, and it is read only when time or connections run out.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._strangers: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._is_full = False

    def __call__(self) -> asyncio.Protocol:
        loop = asyncio.get_running_loop()
        stranger = self._server()
        self._strangers[stranger] = loop.call_later(KEY_S, self._put_out, [stranger])
        self._put_out_soon()
        return stranger

    def let_in(self, http: web.Request) -> None:
        """It has shown a key: from now on its connection is an agent's."""
        if (timer := self._strangers.pop(http.protocol, None)) is not None:
            timer.cancel()

    def _put_out_soon(self) -> None:
        if len(self._strangers) >= MOST_STRANGERS and not self._is_full:
            self._is_full = True
            asyncio.get_running_loop().call_later(_CONNECTS_S, self._put_out_and_look_again, [*self._strangers])

    def _put_out_and_look_again(self, strangers: Sequence[web.RequestHandler]) -> None:
        self._is_full = False
        self._put_out(strangers)
        self._put_out_soon()  # as many may have come meanwhile

    def _put_out(self, strangers: Sequence[web.RequestHandler]) -> None:
        """End those of other users."""
        ours = connections_of(os.geteuid())
        for stranger in strangers:
            if (timer := self._strangers.pop(stranger, None)) is None:  # it has shown its key meanwhile
                continue
            timer.cancel()
            transport = stranger.transport
            if transport is not None and transport.get_extra_info("peername") not in ours:
                transport.abort()


def connections_of(uid: int) -> set[Address]:
    """The addresses of this user's ends of IPv4 connections, also of those that a socket of IPv6 has."""
    return {_address(row[_LOCAL]) for table in _TABLES for row in _rows(table) if int(row[_UID]) == uid}


def _rows(table: Path) -> list[list[str]]:
    with suppress(OSError):  # a kernel without IPv6 has no table of it
        return [line.split() for line in table.read_text().splitlines()[1:]]
    return []


def _address(column: str) -> Address:
    """Read `0100007F:1F90`, or an IPv4 address within one of IPv6, whose last four bytes it is."""
    host, _, port = column.partition(":")
    return socket.inet_ntoa(struct.pack("=I", int(host[-8:], 16))), int(port, 16)
