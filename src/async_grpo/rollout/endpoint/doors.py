"""The ways to the endpoint: a Unix socket that no other user can connect to or take the place of, and TCP.

Any user of the machine can open a TCP connection. Until it has shown the key of an episode, it is a stranger's. Those
of other users get little of the worker: a short time, and few places. Those of this user stay, however late they
show their key: an agent of a busy machine is slow. TCP has no credentials of its peer, so the kernel's table of
connections says whose they are, and it is read only when time or places run out.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from async_grpo.log import logger
from async_grpo.rundir.folders import is_ours

KEY_S = 30.0  # for a connection to show a key
MOST_STRANGERS = 64
_CONNECTS_S = 0.01  # by then a connection has its transport
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOCAL, _UID = 1, 7  # columns

PREFIX = "async-grpo-endpoint-"
_NEW, _NAME = "opened", "socket"  # of one length: a path that can be bound can be connected to
_WAITING = 128  # connections that are not accepted yet

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
        self._make_room_soon()
        return stranger

    def let_in(self, http: web.Request) -> None:
        """It has shown a key: from now on its connection is an agent's."""
        if (timer := self._strangers.pop(http.protocol, None)) is not None:
            timer.cancel()

    def _make_room_soon(self) -> None:
        if len(self._strangers) >= MOST_STRANGERS and not self._is_full:
            self._is_full = True
            asyncio.get_running_loop().call_later(_CONNECTS_S, self._make_room, [*self._strangers])

    def _make_room(self, strangers: Sequence[web.RequestHandler]) -> None:
        self._is_full = False
        self._put_out(strangers)
        self._make_room_soon()  # as many may have come meanwhile

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


class PrivateSocket(NamedTuple):
    """A socket that listens, and the path to connect to."""

    listening: socket.socket
    path: Path


def private_socket() -> PrivateSocket | None:
    """One under XDG_RUNTIME_DIR, or else under the temporary folder. None where neither has a place for it.

    Only this user may enter its folder. A process that is killed leaves that behind, and the next one removes it.
    """
    troubles = []
    for base in _bases():
        try:
            _remove_left_behind(base)
            return _listening(base)
        except OSError as error:  # no rights, no sockets on this file system, or a path of more than 107 bytes
            troubles.append(f"{base}: {error.strerror or error}")
    logger.warning("agents can connect by TCP only, because no Unix socket can be made ({})", "; ".join(troubles))
    return None


def _bases() -> list[Path]:
    """The folder of this user's session is another user's after `sudo`, who could put another socket there."""
    session = Path(os.environ.get("XDG_RUNTIME_DIR") or os.devnull)
    with suppress(OSError):
        if session.stat().st_uid == os.geteuid() and session.is_dir():
            return [session, Path(tempfile.gettempdir())]
    return [Path(tempfile.gettempdir())]


def _listening(base: Path) -> PrivateSocket:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    atexit.register(_remove_ours, folder, os.getpid())
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(folder / _NEW))
        listening.listen(_WAITING)
        (folder / _NEW).rename(folder / _NAME)  # so a socket of this name listens, or its process has ended
    except OSError:
        listening.close()
        _remove(folder)
        raise
    return PrivateSocket(listening, folder / _NAME)


def _remove_left_behind(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        if is_ours(folder) and _is_dead(folder / _NAME):
            _remove(folder)


def _is_dead(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it does not listen yet, or has many connections
            return False
    return False


def _remove_ours(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a child that was forked ends, too
        _remove(folder)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        for name in (_NEW, _NAME):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
