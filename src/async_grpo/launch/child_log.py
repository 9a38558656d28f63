"""Follows a child's log file, for the launcher's screen."""

from __future__ import annotations

import re
from pathlib import Path

from async_grpo.formatting import printable

_OURS = re.compile(r"^\d\d:\d\d:\d\d (DEBUG|INFO|SUCCESS|WARNING|ERROR|CRITICAL) ")
_LAST_WORDS = 30  # lines


class LogTail:
    """Shows the lines that our own log wrote; what libraries print stays in the file.

    Errors may quote what a model wrote, which must not steer the terminal: only printable characters are shown.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._prefix = f"[{name}] "
        self._position = path.stat().st_size if path.exists() else 0
        self._start = self._position
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Whole lines since the last call, with the child's name in front."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = self._rest + file.read()
            self._position = file.tell()
        *lines, self._rest = data.split(b"\n")
        texts = (printable(line.decode(errors="replace")) for line in lines)
        return [self._prefix + text for text in texts if _OURS.match(text)]

    def last_words(self) -> str:
        """What the process said of its failure: from its last `error:` or traceback on, else its last lines."""
        if not self.path.exists():
            return "(it wrote nothing)"
        with self.path.open("rb") as file:
            file.seek(self._start)
            lines = list(map(printable, file.read().decode(errors="replace").splitlines()))
        for index in range(len(lines) - 1, -1, -1):
            if lines[index].startswith(("error: ", "Traceback (most recent call last)")):
                return "\n".join(lines[index:][-2 * _LAST_WORDS :])
        return "\n".join(lines[-_LAST_WORDS:])
