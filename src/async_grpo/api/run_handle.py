"""A run that goes on while the caller does something else, and its process: started here, or found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from async_grpo.api.notebook import Panel
from async_grpo.api.result import Result
from async_grpo.errors import AsyncGRPOError, RunDirError, RunFailedError, UsageError, WaitTimeoutError
from async_grpo.rundir.paths import FAILED, KEEP_LAST_WEIGHTS, RunDir
from async_grpo.settings import STOP_GRACE_S
from async_grpo.setup.generated.sent_function import VARIABLE, in_memory
from async_grpo.setup.process import path_to_us, within
from async_grpo.status.diagnosis import DEAD
from async_grpo.status.snapshot import RunView, look

POLL_S = 0.2
MARGIN_S = 30.0  # for the launcher, after the server's grace
LAST_LINES = 60
NEWS_LINES = 3
START_TIMEOUT_S = 120.0  # until a run has begun: nothing is loaded before that
_STOPPED_BY_US = (-signal.SIGTERM, 130)


class Handle:
    """A run: `wait` for a step, look at its `status`, `stop` it. At the end of a `with` block it is stopped."""

    def __init__(self, run_dir: Path, process: Process, *, panel: Panel | None = None) -> None:
        self.run_dir = run_dir
        self._process = process
        self._panel = panel  # while something waits

    def status(self) -> RunView:
        """The run as it is now, as `async-grpo status --json` has it."""
        return look(self.run_dir, details=False)

    def wait(self, *, step: int | None = None, timeout_s: float | None = None) -> RunView:
        """Wait until optimizer step `step` is done, or without one until the run is over; returns its status.

        In a notebook a panel shows the run meanwhile.

        Raises:
            AsyncGRPOError: the run failed, or ended before that step.
            WaitTimeoutError: `timeout_s` are over. The run goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._process.is_over():
                self._show(self.status(), at_once=True)
                return self._ended(step)
            view = self.status()
            reached = step is not None and view.step >= step
            self._show(view, at_once=reached)
            if reached:
                return view
            if deadline is not None and time.monotonic() > deadline:
                what = "its end" if step is None else f"step {step}"
                raise WaitTimeoutError(
                    f"Waited {timeout_s:g} s for {what} of the run in {self.run_dir}. {view.sentence}"
                )
            time.sleep(POLL_S)

    def result(self) -> Result:
        """Wait until the run is over; returns what it left. Raises `AsyncGRPOError` if it failed."""
        self.wait()
        return Result(self.run_dir)

    def stop(self) -> Result:
        """End the run as Ctrl-C does, with a checkpoint: `resume=True` continues it. An ended run stays."""
        if not self._process.is_over():
            self._process.ask_to_stop()
            if not within(self._grace_s() + MARGIN_S, self._process.is_over):
                self._process.kill()
                within(MARGIN_S, self._process.is_over)
        return Result(self.run_dir)

    def _grace_s(self) -> float:
        """What the run was begun with: who resumes it or finds it again need not know."""
        with suppress(AsyncGRPOError, OSError):
            state = RunDir(self.run_dir).read_state()
            if state is not None:
                return state.plan.launch.stop_grace
        return STOP_GRACE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        with suppress(AsyncGRPOError):
            return f"<run in {self.run_dir}: {self.status().sentence}>"
        return f"<run in {self.run_dir}>"

    def _repr_html_(self) -> str:
        """What a notebook shows of a handle: the panel, as of now."""
        return Panel(self.run_dir).html(self.status())

    def _show(self, view: RunView, *, at_once: bool) -> None:
        if self._panel is not None:
            self._panel.refresh(view, self._process.news() if view.live else (), at_once=at_once)

    def _ended(self, step: int | None) -> RunView:
        error = self._process.error()
        if error is not None:
            raise error
        view = self.status()
        if step is not None and view.step < step:
            raise RunDirError(f"The run in {self.run_dir} ended at step {view.step}, before step {step}.")
        return view


class Process(Protocol):
    """What a `Handle` needs of the process that runs a run."""

    def is_over(self) -> bool: ...

    def error(self) -> AsyncGRPOError | None:
        """Why the run failed, once it is over; None: it did not."""

    def news(self) -> Sequence[str]:
        """What the run's launcher has said lately and is not shown."""

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...


class CommandChild:
    """A command of ours, in a session of its own: Ctrl-C reaches this process alone. Its output is shown here.

    Args:
        payload: a function that its processes are to receive.
        only_errors: do not show its standard output, which `news` has.
    """

    def __init__(self, arguments: Sequence[str], payload: bytes | None = None, *, only_errors: bool = False) -> None:
        self._asked_to_stop, self._only_errors = False, only_errors
        self._news: deque[str] = deque(maxlen=NEWS_LINES)
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        sent = [] if payload is None else [in_memory(payload)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-Pm", "async_grpo.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(sent),
                pass_fds=sent,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        finally:
            for descriptor in sent:
                os.close(descriptor)
        out, err = self._process.stdout, self._process.stderr
        assert out is not None and err is not None
        pipes = ((out, False), (err, True))
        self._readers = [threading.Thread(target=self._show, args=pipe, daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def is_over(self) -> bool:
        if self._process.poll() is None:
            return False
        for reader in self._readers:
            reader.join(timeout=5)  # a grandchild may keep the pipe open
        return True

    def error(self) -> AsyncGRPOError | None:
        code = self._process.returncode
        if code == 0 or (self._asked_to_stop and code in _STOPPED_BY_US):
            return None
        said = "".join(self._last).strip().removeprefix("error: ")
        if code == UsageError.exit_code and said:
            return UsageError(said)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return RunFailedError(f"The process of the run {how}. Its last words:\n{said or '(none)'}")

    def news(self) -> Sequence[str]:
        return tuple(self._news)

    def ask_to_stop(self) -> None:
        self._asked_to_stop = True
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()

    def _show(self, pipe: IO[str], is_stderr: bool) -> None:
        for line in pipe:
            if is_stderr:
                self._last.append(line)
            elif self._only_errors:
                self._news.append(line.rstrip())
                continue
            with suppress(OSError, ValueError):  # this process has closed its own output; the pipe must be emptied
                print(line, end="", flush=True, file=sys.stderr if is_stderr else sys.stdout)


def _environment(sent: Sequence[int]) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": path_to_us(os.environ), "PYTHONUNBUFFERED": "1", KEEP_LAST_WEIGHTS: "1"}
    env.pop(VARIABLE, None)  # this process may itself be one of a run
    if sent:
        env[VARIABLE] = str(sent[0])
    return env


class Found:
    """A run that another process started, perhaps one that has ended since, such as a restarted notebook kernel."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._since = run_dir, time.monotonic()
        look(run_dir, details=False)  # refuses a directory without a run

    def is_over(self) -> bool:
        view = look(self._run_dir, details=False)
        if view.server is None and view.live:  # what prepared the run may have ended before it had a server
            return time.monotonic() - self._since > START_TIMEOUT_S
        return not view.live

    def error(self) -> AsyncGRPOError | None:
        view = look(self._run_dir, details=False)
        return RunFailedError(view.sentence) if view.state == FAILED or view.live or view.state == DEAD else None

    def news(self) -> Sequence[str]:
        return ()

    def ask_to_stop(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid(), number)

    def _pid(self) -> int:
        """The launcher's pid, which the server's command line names; else that of the server, started by hand."""
        import psutil

        server = look(self._run_dir, details=False).server
        if server is None or not server.alive:
            raise RunDirError(f"{self._run_dir} has no live parameter server to stop.")
        command = psutil.Process(server.pid).cmdline()
        with suppress(ValueError, IndexError):
            return int(command[command.index("--launched-by") + 1])
        return server.pid
