"""Reads a child's log file, for the launcher's screen."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from async_grpo.errors import BadFileError
from async_grpo.formatting import printable
from async_grpo.rundir.reading import LineReader, open_plain
from async_grpo.telemetry.run_log import STEP

_LINE = re.compile(r"(\d\d:\d\d:\d\d) ([A-Z]+) +(.*)")  # as `setup.process.LOG_FORMAT` writes it
_LAST_WORDS = 30  # lines
_LAST_BYTES = 1 << 20


def last_line(words: str) -> str:
    """The line of `last_words` that says why: an `error:` begins with it, a traceback ends with it."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if not lines:
        return "it wrote nothing"
    return lines[0] if lines[0].startswith("error: ") else lines[-1]


class LogLine(NamedTuple):
    """A message of a child."""

    name: str  # of the child
    time: str
    level: str
    text: str

    def __str__(self) -> str:
        return f"[{self.name}] {self.time} {self.level:<7} {self.text}"


class LogTail:
    """Follows the messages of our own log; what libraries print stays in the file.

    Messages may quote what a model wrote, which must not steer the terminal: only printable characters are returned.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self._name = path, name
        self._start = path.stat().st_size if path.exists() else 0
        self._reader = LineReader(path, self._start)
        self._file: BinaryIO | None = None  # kept open: it is read to the end even where it is renamed or deleted

    def new_lines(self) -> list[LogLine]:
        """The messages since the last call."""
        self._open()
        try:
            matches = map(_LINE.fullmatch, map(printable, self._reader.new_lines()))
            return [LogLine(self._name, *match.groups()) for match in matches if match]
        except BadFileError:  # something else lies in its place now: the run goes on
            return []

    def last_words(self, *, was_killed: bool = False) -> str:
        """What the process said of its failure: from its last `error:` or traceback on, else its last messages.

        Of step lines there is the last one only.

        Args:
            was_killed: by a signal, so that it could say nothing; an `error:` is of something that it survived.
        """
        self._open()
        if self._file is None:
            return "(it wrote nothing)"
        self._file.seek(max(self._start, os.fstat(self._file.fileno()).st_size - _LAST_BYTES))
        lines = printable(self._file.read(_LAST_BYTES).decode(errors="replace")).splitlines()
        starts = [index for index, line in enumerate(lines) if line.startswith(("error: ", "Traceback (most recent"))]
        if starts and not was_killed:
            return "\n".join(lines[starts[-1] :][-2 * _LAST_WORDS :])
        steps = [index for index, line in enumerate(lines) if (found := _LINE.fullmatch(line)) and found[2] == STEP]
        dropped = set(steps[:-1])
        return "\n".join([line for index, line in enumerate(lines) if index not in dropped][-_LAST_WORDS:])

    def _open(self) -> None:
        if self._file is None:
            with suppress(FileNotFoundError, BadFileError):
                self._file = os.fdopen(open_plain(self.path), "rb", buffering=0)
