"""`AsyncGRPO`: a distributed run, from Python."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from async_grpo.api.child import START_TIMEOUT_S, CommandChild, Found
from async_grpo.api.functions import setup_of
from async_grpo.api.notebook import Panel, in_notebook
from async_grpo.api.options import Options, as_flags
from async_grpo.api.result import Result
from async_grpo.api.run_handle import POLL_S, Handle
from async_grpo.errors import UsageError, WaitTimeoutError
from async_grpo.rundir.folders import require_text
from async_grpo.rundir.lifecycle import preview
from async_grpo.rundir.paths import RunDir


class AsyncGRPO:
    """A run of `async-grpo train --distributed`: a parameter server and workers, each a process of its own.

    Args:
        get_trainer: the path of a setup file, `"package.module:function"`, or a function, also one of a notebook. Each
            process of the run calls it; it returns a `trl.GRPOTrainer`. The path may be that of a YAML file of TRL.
        workers: rollout workers; by default one for each GPU besides the server's, and 2 on a CPU.
        run_dir: queue, logs and metrics of the run.
        options: the options of the command line, each a keyword of the same name.

    Raises:
        AsyncGRPOError: an argument cannot be used; what, why, and what to do.

    Example:
        >>> result = AsyncGRPO("my_trainer.py", workers=2, max_staleness=4).train()
        >>> result.metrics["reward"]
    """

    def __init__(
        self,
        get_trainer: str | os.PathLike[str] | Callable[[], Any],
        *,
        workers: int | None = None,
        run_dir: str | os.PathLike[str] = "worker",
        **options: Unpack[Options],
    ) -> None:
        if workers is not None and options.get("num_workers") is not None:
            raise UsageError("workers and num_workers are the same option: give one of them.")
        self._resume, self._overwrite = options.get("resume", False), options.get("overwrite", False)
        if self._resume and self._overwrite:
            raise UsageError("resume and overwrite exclude each other: continue the unfinished run, or delete it.")
        self.run_dir = _folder(run_dir)
        self._has_panel = in_notebook() and "quiet" not in options
        if self._has_panel:
            options["quiet"] = True
        count: Options = {} if workers is None else {"num_workers": workers}
        self._flags = as_flags({**options, **count})
        self.setup_file, self._payload = setup_of(get_trainer)
        self._started = False

    def train(self) -> Result:
        """Train to the end, and show what the command shows. Ctrl-C ends the run with a checkpoint."""
        with self.start() as handle:
            return handle.result()

    def start(self) -> Handle:
        """Start the run and return at once. It goes on when this process ends; `attach` finds it.

        Raises:
            RunDirError: a run is alive in the directory, or it holds an unfinished one.
            UsageError: this object has started its run before, or the command refuses its options.
        """
        if self._started:
            raise UsageError(
                "This AsyncGRPO has started its run already. Make another for another run; with resume=True and "
                "more steps it trains on."
            )
        preview(self.run_dir, resume=self._resume, overwrite=self._overwrite)
        self._started = True
        before = RunDir(self.run_dir).read_state()
        command = ["train", str(self.setup_file), "--distributed", f"--run-dir={self.run_dir}", *self._flags]
        child = CommandChild(command, self._payload, only_errors=self._has_panel)
        panel = Panel(self.run_dir) if self._has_panel else None
        handle = Handle(self.run_dir, child, panel=panel)
        try:
            self._await_beginning(child, before.run_id if before else "")
        except BaseException:
            handle.stop()
            raise
        return handle

    @staticmethod
    def attach(run_dir: str | os.PathLike[str] = "worker") -> Handle:
        """The run in a directory, live or not, whoever started it: after a restart of a notebook's kernel, say."""
        path = _folder(run_dir)
        return Handle(path, Found(path), panel=Panel(path) if in_notebook() else None)

    def _await_beginning(self, child: CommandChild, earlier: str) -> None:
        """Return when the directory is this run's. Raises what ended the launcher before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not child.is_over():
            state = RunDir(self.run_dir).read_state()
            if state is not None and (self._resume or state.run_id != earlier):
                return
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"The launcher has not begun the run in {self.run_dir} within {START_TIMEOUT_S:g} s."
                )
            time.sleep(POLL_S)
        error = child.error()
        if error is not None:
            raise error


def _folder(run_dir: str | os.PathLike[str]) -> Path:
    try:
        folder = Path(run_dir).expanduser().absolute()
        require_text(str(folder))
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a home directory that there is not
        raise UsageError(f"run_dir={run_dir!r} cannot be: {error}.") from error
    return folder
