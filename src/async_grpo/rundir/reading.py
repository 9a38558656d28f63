"""Reads files that others may have put there: without waiting, without following a link, up to a bound.

What comes from a run directory or a checkpoint is opened here, and its shape is checked by `shape`. Functions that take
a descriptor or a text raise a `BadFileError` with the reason alone ("it is a named pipe"), as does `open_plain`; the
others put the name of the file before it. A file that does not exist is `FileNotFoundError`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from async_grpo.errors import BadFileError

MAX_JSON_BYTES = 64 << 20  # of a whole file of JSON; the largest ones name every group that was not used
MAX_LINE_BYTES = 4 << 20
MAX_NESTING = 200  # of JSON; more than anything of ours, and less than makes code that goes through it fail

_BUFFER = 1 << 20
_DECODER = json.JSONDecoder()
_REFUSED = (  # faults of the file, not of this process or its disk
    *(errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.ENOTDIR, errno.ENODEV, errno.EOPNOTSUPP, errno.ENAMETOOLONG),
)
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode), "a device"),
)


def open_plain(path: str | Path, flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file. `BadFileError` gives the reason where it is anything else.

    Args:
        flags: how to open it. With `O_CREAT`, a file that is not there yet is made with mode 0600.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a named pipe must not wait for its other end
    try:
        fd = os.open(path, flags, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            bad("it is a link, and links are not followed")
        if error.errno not in _REFUSED:
            raise
        raise BadFileError(f"it cannot be opened: {error.strerror}") from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "of an unknown kind")
        bad(f"it is {kind}, not a regular file")
    return fd


def read_and_close(fd: int, at_most: int, *, own: bool = False) -> bytearray:
    """The whole file. `BadFileError` if it is larger, or has to be this user's `own` and is not."""
    try:
        status = os.fstat(fd)
        size, done = status.st_size, 0
        if own and status.st_uid != os.geteuid():
            bad(f"it belongs to user {status.st_uid}")
        if size > at_most:
            bad(f"{size:,} bytes are over the limit of {at_most:,}")
        data = bytearray(size)
        with memoryview(data) as view:
            while done < size and (got := os.readv(fd, [view[done:]])):  # reads are short only for very large files
                done += got
    finally:
        os.close(fd)
    del data[done:]
    return data


def read_file(path: Path, at_most: int = MAX_JSON_BYTES) -> bytearray:
    """The bytes of a regular file."""
    with naming(path):
        return read_and_close(open_plain(path), at_most)


def read_end(path: Path, at_most: int) -> tuple[bytes, int]:
    """The last bytes of a file, and how many are before them."""
    with naming(path), os.fdopen(open_plain(path), "rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - at_most)
        file.seek(start)
        return file.read(at_most), start


def read_object(path: Path, at_most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file."""
    data = read_file(path, at_most)
    with naming(path):
        return parse_object(data)


def parse_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """The JSON object in a text. `BadFileError` gives the reason where it holds anything else."""
    found = parse_deep_object(text)
    if is_nested_deeper(found, MAX_NESTING):
        bad("its JSON is nested too deeply")
    return found


def parse_deep_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """As `parse_object`, but nested however deeply: for code that checks the nesting of the values itself."""
    try:
        found = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        bad("its JSON is nested too deeply")
    except ValueError as error:  # UnicodeDecodeError, and an integer of thousands of digits, among them
        raise BadFileError(f"it is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        bad("its JSON is not an object")
    return found


def is_nested_deeper(value: dict[str, Any] | list[Any], levels: int) -> bool:
    """Whether a JSON value has more than so many lists and objects within each other, itself among them."""
    outer: list[Any] = [value]
    for _ in range(levels):
        lists = [one.values() if type(one) is dict else one for one in outer]
        outer = [item for items in lists for item in items if type(item) in (dict, list)]
        if not outer:
            return False
    return True


class LineReader:
    """Reads what was appended to a file of lines behind `position`, from another process or later."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._path = path
        self.position = position
        self._in_long_line = False

    def new_lines(self, *, half: bool = False) -> Iterator[str]:
        """The whole lines since the last call; none where there is no file. `BadFileError` if it is not a plain file.

        A file that is shorter than before is read from its beginning. Of a line that is too long to be one of ours
        (zeros that a power cut left: `test_lines_come_as_they_are_written_and_a_huge_one_costs_no_memory`), only the
        beginning is given.

        Args:
            half: also what follows the last whole line.
        """
        try:
            with naming(self._path):
                fd = open_plain(self._path)
        except FileNotFoundError:
            return
        with os.fdopen(fd, "rb", buffering=_BUFFER) as file:
            if os.fstat(fd).st_size < self.position:
                self.position, self._in_long_line = 0, False
            file.seek(self.position)
            while line := file.readline(MAX_LINE_BYTES):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < MAX_LINE_BYTES:
                    if half:
                        yield _text(line)
                    return  # it is being written
                self.position += len(line)
                goes_on, self._in_long_line = self._in_long_line, not is_whole
                if not goes_on:
                    yield _text(line[:-1]) if is_whole else f"{_text(line[:200])}… (over {MAX_LINE_BYTES:,} bytes)"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of the file before the reason of a `BadFileError`."""
    try:
        yield
    except BadFileError as error:
        raise BadFileError(f"{path} cannot be used: {error}") from error


def _text(line: bytes) -> str:
    return line.decode(errors="replace")


def bad(reason: str) -> NoReturn:
    raise BadFileError(reason)
