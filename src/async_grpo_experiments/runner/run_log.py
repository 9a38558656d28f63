"""What the runner says: on standard output, and in `run.log`."""

from __future__ import annotations

import time
from pathlib import Path

from async_grpo.rundir.files import LineFile
from async_grpo_experiments.runner.screen import NAME
from async_grpo_experiments.slots.screen import stamped

RUN_LOG = "run.log"


class ExperimentLog:
    """`run.log` of an experiment."""

    def __init__(self, root: Path) -> None:
        self._file = LineFile(root / RUN_LOG)

    def say(self, text: str) -> None:
        """Print a line, and note it."""
        print(stamped(NAME, text), flush=True)
        self.note(text)

    def note(self, text: str) -> None:
        """Write a line to the file alone."""
        self._file.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def close(self) -> None:
        self._file.close()
