"""A Unix socket in a folder that only this user may enter: no other user can connect to it, or take its places.

A process that is killed leaves the folder behind. The next one removes it: nothing listens there any more.
"""

from __future__ import annotations

import atexit
import os
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from async_grpo.log import logger

PREFIX = "async-grpo-endpoint-"
_NEW, _NAME = "opened", "socket"  # of one length: a path that can be bound can be connected to
_WAITING = 128  # connections that are not accepted yet


class PrivateSocket(NamedTuple):
    """A socket that listens, and the path to connect to."""

    listening: socket.socket
    path: Path


def private_socket() -> PrivateSocket | None:
    """One under XDG_RUNTIME_DIR, or else under the temporary folder. None where neither has a place for it."""
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
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and _is_dead(folder / _NAME):
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
