"""Asks a process of its own for facts, so that a crash or a hang there is a sentence here.

The module that is asked ends with `if __name__ == "__main__": probe.answer(function)`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from async_grpo.setup.process import end_with_parent, has_ended, leave_at_once, path_to_us, start_logged, within

POLL_S = 0.05
_LAST_LINES = 20


class ChildFailed(Exception):
    """The process gave no answer.

    Attributes:
        how: how it ended, e.g. "was killed by SIGKILL".
        said: the last lines of its output.
    """

    def __init__(self, how: str, said: list[str]) -> None:
        self.how = how
        self.said = said

    def __str__(self) -> str:
        return f"it {self.how}: {' / '.join(self.said[-3:]) or 'it said nothing'}"


def ask(module: str, question: dict[str, Any], *, timeout_s: float, env: Mapping[str, str] = os.environ) -> Any:
    """Run `python -m MODULE` and return what it answers. Whatever it started in its session ends with it.

    Raises:
        ChildFailed: it ended without an answer, or gave none in time.
    """
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as scratch:
        answer, said = Path(scratch) / "answer.json", Path(scratch) / "output.txt"
        command = [sys.executable, "-Pm", module, json.dumps(question), str(answer)]
        child = start_logged(command, {**env, "PYTHONPATH": path_to_us(env)}, said)
        try:
            in_time = within(timeout_s, lambda: has_ended(child), POLL_S)
        finally:
            _end_family(child)
        if not in_time or child.returncode != 0:
            how = how_it_ended(child.returncode) if in_time else f"did not answer in {timeout_s:g} s"
            raise ChildFailed(how, said.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        return json.loads(answer.read_text())


def answer(function: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """In the process that is asked: answer, and leave at once, whatever its other threads do."""
    end_with_parent(os.getppid())
    question, path = sys.argv[1:]
    text = json.dumps(function(json.loads(question)))
    Path(path).write_text(text)
    leave_at_once(0)


def _end_family(child: subprocess.Popen[bytes]) -> None:
    """The child and what it started in its session; nothing else has its session before it is waited for.

    What outlives a child that has ended may be tidying up after it, so that is asked, not killed.
    """
    os.killpg(child.pid, signal.SIGTERM if has_ended(child) else signal.SIGKILL)
    child.wait()


def how_it_ended(code: int) -> str:
    hint = " (the system kills what takes more memory than there is)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}" if code < 0 else f"ended with exit code {code}"
