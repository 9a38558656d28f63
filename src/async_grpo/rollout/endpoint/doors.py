"""Connections that have not shown the key of an episode: any user of the machine can open one.

They get little of the worker: a short time, and few places. Where all are taken, the oldest makes room, so a program
that opens connections and says nothing leaves those of an agent alone, which show their key at once.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

KEY_S = 30.0  # for a connection to show a key
MOST_STRANGERS = 64
_CONNECTS_S = 0.1  # by then a connection has its transport


class Doors:
    """Makes the protocol of each new connection of a server. Used on the server's event loop."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._strangers: dict[web.RequestHandler, asyncio.TimerHandle] = {}  # the oldest first

    def __call__(self) -> asyncio.Protocol:
        while len(self._strangers) >= MOST_STRANGERS:
            self._end(next(iter(self._strangers)))
        stranger = self._server()
        self._strangers[stranger] = asyncio.get_running_loop().call_later(KEY_S, self._end, stranger)
        return stranger

    def let_in(self, http: web.Request) -> None:
        """It has shown a key: from now on its connection is an agent's."""
        if (timer := self._strangers.pop(http.protocol, None)) is not None:
            timer.cancel()

    def _end(self, stranger: web.RequestHandler) -> None:
        if (timer := self._strangers.pop(stranger, None)) is not None:
            timer.cancel()
        if stranger.transport is not None:
            stranger.transport.abort()
        elif timer is not None:  # it is being made, or has ended
            asyncio.get_running_loop().call_later(_CONNECTS_S, self._end, stranger)
