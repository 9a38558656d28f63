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
from kit.waiting import until, until_gone

ROOT = Path(__file__).resolve().parents[2]
SETUP = Path(__file__).parent / "setups" / "random_model.py"
DEADLINE_S = 240.0
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
            arguments = _arguments(child)
            if "worker" in arguments and arguments[arguments.index("--id") + 1] == str(number):
                return child
        return None

    def kill(self) -> None:
        """Kill it, and wait for the end of all that it has started."""
        family = self.children()
        self.process.kill()
        self.process.wait()
        until_gone(family)

    def kill_one_of_two_at_work(self, queue: Path, jobs: str = "") -> None:
        """Kill the worker that is the first to have a job whose name begins so."""
        names = {number: f"{jobs}*_processing_by_dev{number}.safetensors" for number in (1, 2)}
        number, *_ = self.wait_until(
            lambda: [number for number, name in names.items() if any(queue.glob(name))], "a job on a worker"
        )
        victim = self.worker(number)
        assert victim is not None
        victim.kill()

    def server(self) -> psutil.Process:
        """The process of the parameter server, or of its only rank."""
        return next(child for child in self.children() if "server" in _arguments(child))

    def wait(self) -> int:
        try:
            return self.process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end in {DEADLINE_S:.0f} s:\n{self.output}") from None

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true result of `condition` while the command runs."""
        return until(condition, what, deadline_s=DEADLINE_S, process=self.process, said=lambda: self.output)


def _arguments(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):  # as psutil says of a zombie as well
        return process.cmdline()
    return []


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
            for process in [psutil.Process(running.process.pid), *running.children()]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            running.process.wait()


def ran(*arguments: str, cwd: Path, code: int = 0, **options: Any) -> str:
    """What a command of ours has printed, which ends with this code. `options`: as of `command`."""
    with command(*arguments, cwd=cwd, **options) as running:
        assert running.wait() == code, running.output
    return running.output


def finish(folder: Path, *options: str, setup: Path = SETUP, **env: str) -> str:
    """Train to the end in `folder`; what was printed."""
    return ran("train", str(setup), *options, cwd=folder, **env)


def kill_the_server_at(step: int, folder: Path, *options: str, setup: Path = SETUP, **env: str) -> None:
    """Train in `folder` until the server is killed at this step, which ends the run."""
    folder.mkdir(exist_ok=True)
    with command("train", str(setup), *options, cwd=folder, TEST_REWARD_S="0.4", **env) as run:
        run.wait_until(lambda: len(steps_logged(folder / "worker")) >= step, f"step {step}")
        run.server().kill()
        assert run.wait() != 0, run.output


def audited(run_dir: Path) -> str:
    """What `audit` prints of a run, in which it finds nothing wrong."""
    with redirect_stdout(StringIO()) as said:
        assert main(["audit", str(run_dir)]) == 0, said.getvalue()
    return said.getvalue()


def weights_of_a_replay(folder: Path, **env: str) -> str:
    """The digest of what `replay` makes of the record in `folder`, after `audit` found nothing wrong with it."""
    audited(folder / "worker")
    said = ran("replay", "worker", "-d", "cpu", cwd=folder, **env)
    assert "equal to" in said
    return said.partition("SHA-256 ")[2].split()[0]


def steps_logged(run_dir: Path) -> list[int]:
    """The training steps, in the order of logging; of a live run as well."""
    return [entry["step"] for entry in logged(run_dir)]


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` has of the training steps."""
    return [entry for entry in lines_of(run_dir / "metrics.jsonl") if "loss" in entry]


def values_logged(run_dir: Path, name: str) -> list[float]:
    """A metric of the training steps that have it."""
    return [entry[name] for entry in logged(run_dir) if name in entry]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON; none where there is no file."""
    return [*map(json.loads, LineReader(path).new_lines())]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
