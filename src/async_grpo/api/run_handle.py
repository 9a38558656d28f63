"""A run that goes on while the caller does something else."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from async_grpo.api.child import Process
from async_grpo.api.notebook import Panel
from async_grpo.api.result import Result
from async_grpo.errors import AsyncGRPOError, RunDirError, WaitTimeoutError
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import STOP_GRACE_S
from async_grpo.setup.process import within
from async_grpo.status.snapshot import RunView, look

POLL_S = 0.2
MARGIN_S = 30.0  # for the launcher, after the server's grace


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
