"""Asks a process of its own for facts, so that a crash or a hang there is a line and no crash here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.setup.process import path_to_us

LAST_LINES = 3


class ChildFailed(Exception):
    """The process gave no answer; the text says how it ended and what it said last."""


def start(module: str, arguments: Sequence[str] = (), cwd: Path | None = None) -> subprocess.Popen[str]:
    """`python -m MODULE ARGUMENTS` with pipes on all three sides."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path_to_us(os.environ)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str], timeout_s: float) -> Any:
    """The JSON of its last line, once it has ended. Kills it after `timeout_s`."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise ChildFailed(f"no answer in {timeout_s:g} s") from None
    if process.returncode != 0 or not output.strip():
        last = " / ".join(errors.strip().splitlines()[-LAST_LINES:]) or "it said nothing"
        raise ChildFailed(f"it ended with code {process.returncode}: {last}")
    return json.loads(output.strip().splitlines()[-1])
