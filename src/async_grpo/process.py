"""What each process of a run does about signals, its parent's death, its log and its environment."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import FrameType

from loguru import logger

LOG_FORMAT = "{time:HH:mm:ss} <level>{level: <7}</level> {message}"
_PR_SET_PDEATHSIG = 1


class StopRequest:
    """What SIGTERM and SIGINT do: end the process at once while it starts, set a flag once it `defers()`."""

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def __bool__(self) -> bool:
        return self.requested

    def install(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def defer(self) -> None:
        """From now on somebody looks at the flag and ends in good order."""
        self._deferred = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self._deferred:
            raise SystemExit(0)


def end_with_parent(parent_pid: int) -> None:
    """Get SIGTERM when the parent dies, even by SIGKILL, so that no child of a launcher is left behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)


def set_up_log(level: str) -> None:
    """Log to stderr, in one line a message."""
    logger.remove()
    logger.add(sys.stderr, level=level, format=LOG_FORMAT)


def log_prints() -> None:
    """Send what the user's code prints through the log, so that a launcher shows it, with time and name."""
    sys.stdout = _PrintLog()


class _PrintLog(io.TextIOBase):
    """A standard output whose every line is a message of the log."""

    def __init__(self) -> None:
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                logger.info("{}", line.rstrip())
        return len(text)


def log_to(file: Path, level: str) -> None:
    """Log to `file` too (a launcher has redirected stderr there already, so only what is started by hand needs it)."""
    logger.add(file, level=level, format=LOG_FORMAT, colorize=False)


def own_compile_cache(name: str, env: MutableMapping[str, str]) -> None:
    """Give each process its own folder for Unsloth's compiled code; two that share one overwrite each other."""
    base = env.get("UNSLOTH_COMPILE_LOCATION") or "unsloth_compiled_cache"
    env["UNSLOTH_COMPILE_LOCATION"] = str(Path(base) / name)


def make_deterministic() -> None:
    """Fix threads and kernels, so that the same input gives the same bits. Call it before the model is built."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
