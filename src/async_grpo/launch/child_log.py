"""Reads a child's log file, for the launcher's screen."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from async_grpo.formatting import printable
from async_grpo.rundir.files import LineReader

_LINE = re.compile(r"(\d\d:\d\d:\d\d) ([A-Z]+) +(.*)")  # as `setup.process.LOG_FORMAT` writes it
_LAST_WORDS = 30  # lines


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
        matches = map(_LINE.fullmatch, map(printable, self._reader.new_lines()))
        return [LogLine(self._name, *match.groups()) for match in matches if match]

    def last_words(self) -> str:
        """What the process said of its failure: from its last `error:` or traceback on, else its last lines."""
        self._open()
        if self._file is None:
            return "(it wrote nothing)"
        self._file.seek(self._start)
        lines = printable(self._file.read().decode(errors="replace")).splitlines()
        starts = [index for index, line in enumerate(lines) if line.startswith(("error: ", "Traceback (most recent"))]
        return "\n".join(lines[starts[-1] :][-2 * _LAST_WORDS :] if starts else lines[-_LAST_WORDS:])

    def _open(self) -> None:
        if self._file is None:
            with suppress(FileNotFoundError):
                self._file = self.path.open("rb", buffering=0)
