"""Starts real runs for tests, waits for conditions in them, and ends exactly what was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import psutil

from async_grpo.cli import main
from async_grpo.rundir.reading import LineReader

ROOT = Path(__file__).resolve().parents[2]
SETUP = Path(__file__).parent / "setups" / "random_model.py"
DEADLINE_S = 240.0
LAST_S = 30.0  # for what a process leaves behind
IN_MID_BATCH = {"num_iterations": 3, "lr_scheduler_type": "constant"}
"""Fields of `GRPOConfig`: checkpoints 4, 8, 14, 16 and 20 are between the optimizer steps of one generation batch."""


class Command:
    """One command of ours, with what it printed."""

    def __init__(
        self, arguments: Sequence[str], cwd: Path, script: Path | None = None, within: Sequence[str] = (), **env: str
    ) -> None:
        self._output = cwd / f"output-{time.monotonic_ns()}.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*within, sys.executable, *(["-m", "async_grpo.cli"] if script is None else [str(script)]), *arguments],
                cwd=cwd,
                env={**os.environ, "PYTHONPATH": _path(env), "LOG_LEVEL": "INFO", **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker(self, number: int) -> psutil.Process | None:
        """The process of worker `number`, if it runs now."""
        for child in self.children():
            try:
                arguments = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "worker" in arguments and arguments[arguments.index("--id") + 1] == str(number):
                return child
        return None

    def server(self) -> psutil.Process:
        """The process of the parameter server, or of its only rank."""
        return next(child for child in self.children() if "server" in child.cmdline())

    def wait(self) -> int:
        try:
            return self.process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end in {DEADLINE_S:.0f} s:\n{self.output}") from None

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for `condition` to be true while the command runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not (result := condition()):
            assert self.process.poll() is None, f"ended while waiting for {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} in {DEADLINE_S:.0f} s:\n{self.output}"
            time.sleep(0.05)
        return result


def _path(env: dict[str, str]) -> str:
    """Where the command finds modules: ours, and what a test puts in their way with TEST_EXTRA_PATH."""
    return os.pathsep.join([str(ROOT / "src"), *filter(None, [env.get("TEST_EXTRA_PATH")])])


@contextmanager
def command(
    *arguments: str, cwd: Path, script: Path | None = None, within: Sequence[str] = (), **env: str
) -> Iterator[Command]:
    """Run a command of ours, or a script; at the end of the block it and every process that it started is gone.

    `within`: a command that runs it, as another machine's.
    """
    running = Command(arguments, cwd, script, within, **env)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            family = [psutil.Process(running.process.pid), *running.children()]
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            running.process.wait()


def finish(folder: Path, *options: str, setup: Path = SETUP, **env: str) -> str:
    """Train to the end in `folder`; what was printed."""
    with command("train", str(setup), *options, cwd=folder, **env) as run:
        assert run.wait() == 0, run.output
    return run.output


def audited(run_dir: Path) -> str:
    """What `audit` prints of a run, in which it finds nothing wrong."""
    with redirect_stdout(StringIO()) as said:
        assert main(["audit", str(run_dir)]) == 0, said.getvalue()
    return said.getvalue()


def weights_of_a_replay(folder: Path, **env: str) -> str:
    """The digest of what `replay` makes of the record in `folder`, after `audit` found nothing wrong with it."""
    audited(folder / "worker")
    with command("replay", "worker", "-d", "cpu", cwd=folder, **env) as run:
        assert run.wait() == 0, run.output
    assert "equal to" in run.output
    return run.output.partition("SHA-256 ")[2].split()[0]


def steps_logged(run_dir: Path) -> list[int]:
    """The training steps in `metrics.jsonl`, in the order of logging; of a live run as well."""
    entries = map(json.loads, LineReader(run_dir / "metrics.jsonl").new_lines())
    return [entry["step"] for entry in entries if "loss" in entry]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether all are gone, at once or soon: what a process of ours has started itself may end a moment after it."""
    deadline = time.monotonic() + LAST_S
    while any(map(_lives, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
