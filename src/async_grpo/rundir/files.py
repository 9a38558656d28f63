"""Files that are whole at every moment, whatever happens to the disk or to the process: of lines, and of JSON."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from async_grpo.errors import BadFileError, DiskFullError
from async_grpo.rundir.reading import naming, open_plain

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHUNK_BYTES = 1 << 20


@contextmanager
def space_for(path: Path) -> Iterator[None]:
    """Raise `DiskFullError` where the block finds no space for `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError(f"The disk is full: no room for {path}. Make room, then continue with --resume.") from error


def write_json(path: Path, data: object) -> None:
    """Write a JSON file that appears whole or not at all. `DiskFullError` if there is no space for it."""
    _write(path, json.dumps(data, indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with space_for(path):
            temporary.write_text(text)
            temporary.replace(path)
    except IsADirectoryError as error:
        temporary.unlink()
        raise BadFileError(f"{path} cannot be written: it is a directory. Move it away, then continue.") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file of lines that appears whole or not at all. `DiskFullError` if there is no space for it."""
    _write(path, "".join(f"{line}\n" for line in lines))


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Make an empty folder for as long as the block lasts. What a killed process left there is removed first."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(mode=0o700, parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def free_name(path: Path) -> Path:
    """The path, or the first of `NAME-2`, `NAME-3`, … beside it, where there is nothing."""
    names = chain([path.name], (f"{path.name}-{number}" for number in count(2)))
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


def sync(path: Path) -> None:
    """Make what a file or a folder has now survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineFile:
    """Appends to `path`. While the disk is full, lines wait in memory and the process continues.

    Half a line, which a crash or a power cut may have left, is cut off first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        with naming(path):
            self._file = os.fdopen(open_plain(path, flags), "a+b", buffering=0)
        self._end = _end_of_last_line(self._file)
        self._file.truncate(self._end)
        self._waiting: list[bytes] = []  # lines for which there was no space

    def append(self, line: str) -> None:
        self._waiting.append(line.encode() + b"\n")
        self._write()

    def sync(self) -> None:
        """Every line survives a power cut from now on. `DiskFullError` if there is still no space for one."""
        if not self._write():
            raise DiskFullError(f"The disk is full: no room for {len(self._waiting)} lines of {self._path}.")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed and not self._write():
            _warn(f"the disk is full: {len(self._waiting)} lines of {self._path} are lost")
        self._file.close()

    def _write(self) -> bool:
        """Write the waiting lines; False if there is no space for all of them."""
        warned = len(self._waiting) > 1
        while self._waiting:
            try:
                written = self._file.write(self._waiting[0])
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                written = 0
            if written < len(self._waiting[0]):
                self._file.truncate(self._end)
                if not warned:
                    _warn(f"the disk is full: {self._path} grows again when there is room")
                return False
            self._end += written
            self._waiting.pop(0)
        return True


def _end_of_last_line(file: BinaryIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


def _warn(text: str) -> None:
    from async_grpo.log import logger  # `--help` gets here and must not need it

    logger.warning("{}", text)
