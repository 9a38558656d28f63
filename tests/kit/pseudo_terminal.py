"""A command on a terminal of its own, and what it left there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

DEADLINE_S = 240.0
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_SEQUENCE = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")


def plain(text: str) -> str:
    """Without the sequences that move the cursor or colour."""
    return _SEQUENCE.sub("", text)


class PseudoTerminal:
    """Runs `command` as a user would at a terminal of `columns` columns."""

    def __init__(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.settings_before = termios.tcgetattr(theirs)
        names = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**names, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._theirs = theirs  # kept open, so that nothing is lost when the command ends
        self.written = b""

    @property
    def text(self) -> str:
        """Everything that was written, as one would read it."""
        return plain(self.written.decode(errors="replace"))

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def read_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.text[-4000:]}"
            self._read(0.1)

    def wait(self) -> int:
        """The exit code, once everything that it wrote is here."""
        self.read_until(lambda: self.process.poll() is not None, "end")
        while self._read(0):
            pass
        return self.process.returncode

    def is_clean(self) -> bool:
        """The cursor is visible, and the terminal's settings are what they were."""
        visible = self.written.rfind(SHOW_CURSOR) >= self.written.rfind(HIDE_CURSOR)
        return visible and termios.tcgetattr(self._theirs) == self.settings_before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], timeout_s)
        if ready:
            self.written += os.read(self._ours, 1 << 16)
        return bool(ready)
