"""Standard output and standard error that never end a run: what cannot be written is dropped, counted and reported."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_MOST_WAITING = 1 << 16  # characters without an end of line


class LossyOutput(io.TextIOBase):
    """Writes to `stream`, a line at a time, until that fails: the disk is full, the pipe is closed, the terminal gone.

    From then on it drops what it is given, tries again with each line, and says how many lines are missing once there
    is space again.

    Args:
        tell: takes a sentence when the first line is dropped; this stream cannot say it.
    """

    def __init__(self, stream: TextIO, tell: Callable[[str], object] = lambda sentence: None) -> None:
        self._stream, self._tell = stream, tell
        self._waiting = ""
        self.dropped = 0  # lines, since the last one that was written
        self._told = False
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError):  # not a file of the kernel
            self._fd = -1
        with suppress(OSError):
            stream.flush()

    def __getattr__(self, name: str) -> Any:
        """`buffer`, `reconfigure` and what else a program may use of a standard output."""
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._waiting += text
        if "\n" in text or len(self._waiting) > _MOST_WAITING:
            self.flush()
        return len(text)

    def write_line(self, line: str) -> None:
        """For a log, whose messages are lines."""
        self.write(line)

    def flush(self) -> None:
        text, self._waiting = self._waiting, ""
        if not text:
            return
        try:
            if self.dropped:
                self._put(f"\n[{self.dropped} lines of this output are missing: they could not be written]\n")
                self.dropped = 0
            self._put(text)
        except OSError as error:
            self.dropped += max(1, text.count("\n"))
            if not self._told:
                self._told = True
                name = {1: "standard output", 2: "standard error"}.get(self._fd, "output")
                self._tell(f"{name} cannot be written ({error.strerror}): the run continues without it\n")

    def _put(self, text: str) -> None:
        if self._fd < 0:
            self._stream.write(text)
            self._stream.flush()
            return
        rest = memoryview(text.encode(self.encoding, errors="backslashreplace"))
        while rest:
            rest = rest[os.write(self._fd, rest) :]


def survive_lost_output() -> None:
    """From now on this process goes on although nobody reads what it prints, or no disk has space for it."""
    if not isinstance(sys.stderr, LossyOutput):
        sys.stderr = LossyOutput(sys.stderr or _nowhere())
        sys.stdout = LossyOutput(sys.stdout or _nowhere(), tell=sys.stderr.write)


def _nowhere() -> TextIO:
    """In place of an output that was closed when the process began: Python has None for it."""
    return Path(os.devnull).open("w")
