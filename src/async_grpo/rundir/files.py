"""Text files that grow by whole lines, whatever happens to the disk or to the process; and full disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loguru import logger

from async_grpo.errors import DiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Raise `DiskFullError` where the block finds no room for `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError(f"The disk is full: no room for {path}. Make room, then go on with --resume.") from error


class LineFile:
    """Appends to `path`. While the disk is full, lines wait in memory and nobody else has to.

    Half a line, which a crash or a power cut may have left, is cut off first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        self._end = self._file.read().rfind(b"\n") + 1
        self._file.truncate(self._end)
        self._waiting: list[bytes] = []  # lines for which there was no room

    def append(self, line: str) -> None:
        self._waiting.append(line.encode() + b"\n")
        self._write()

    def sync(self) -> None:
        """Every line survives a power cut from now on. `DiskFullError` if there is still no room for one."""
        if not self._write():
            raise DiskFullError(f"The disk is full: no room for {len(self._waiting)} lines of {self._path}.")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed and not self._write():
            logger.warning("the disk is full: {} lines of {} are lost", len(self._waiting), self._path)
        self._file.close()

    def _write(self) -> bool:
        """Write what waits; False if there is no room for all of it."""
        told = len(self._waiting) > 1
        while self._waiting:
            try:
                written = self._file.write(self._waiting[0])
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                written = 0
            if written < len(self._waiting[0]):
                self._file.truncate(self._end)
                if not told:
                    logger.warning("the disk is full: {} goes on when there is room", self._path)
                return False
            self._end += written
            self._waiting.pop(0)
        return True


class LineReader:
    """Reads what was appended to a `LineFile`, from another process or later.

    Args:
        position: bytes from the beginning that were read before.
    """

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self.position = position

    def new_lines(self) -> list[str]:
        """The whole lines since the last call. A file that is shorter than before is read from its beginning."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.position:
                    self.position = 0
                file.seek(self.position)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.position += len(whole)
        return whole.decode(errors="replace").split("\n")[:-1]
