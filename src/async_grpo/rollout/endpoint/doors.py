"""The connections of the endpoint, on 127.0.0.1.

Any user of the machine can open one. Until it has shown the key of an episode, it is a stranger's. Those of other
users get little of the worker: a short time, and few connections. Those of this user stay, however late they show their
key: an agent of a busy machine is slow. TCP has no credentials of its peer, so the kernel's table of connections says
whose they are, and it is read only when time or connections run out.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from aiohttp import web

KEY_S = 30.0  # for a connection to show a key
MOST_STRANGERS = 64
_CONNECTS_S = 0.01  # by then a connection has its transport
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _UID = 1, 7  # columns

Address = tuple[str, int]


class Doors:
    """Makes the protocol of each new connection of a server. Used on the server's event loop."""

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
