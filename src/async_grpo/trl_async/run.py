"""The run directory of a training under TRL's trainer, and the worker processes that serve it."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from typing import Any

from loguru import logger

from async_grpo.errors import AsyncGRPOError, RunDirError, RunFailedError
from async_grpo.launch.child_log import LogTail
from async_grpo.launch.launcher import REFUSED, LaunchOptions, worker_child
from async_grpo.launch.supervisor import MAX_RESTARTS_IN_A_ROW, Child, Supervisor
from async_grpo.rundir import paths as runs
from async_grpo.rundir.files import write_json
from async_grpo.rundir.lifecycle import in_use, prepare
from async_grpo.rundir.locks import KernelLock, server_alive, server_lock
from async_grpo.rundir.paths import SERVER, RunDir
from async_grpo.settings import WorkerSettings, as_flags
from async_grpo.setup.devices import CPU
from async_grpo.setup.generated.sent_function import VARIABLE, in_memory
from async_grpo.telemetry.activity import ENDING, LOADING, activity


class QueueRun:
    """One run in a run directory, from `begin` to `end`. This process is its server.

    Args:
        options: what the workers are started with; its `training` is TRL's and not used.
        config_values: fields of the workers' `GRPOConfig`.
        payload: the function that they call, where it is in no file.
    """

    def __init__(self, options: LaunchOptions, config_values: Mapping[str, str], payload: bytes | None = None) -> None:
        self.dir = RunDir(options.run_dir)
        self.lock: KernelLock = server_lock(self.dir.root)
        self.run_id, self._began = "", 0.0  # once it has begun, and when (monotonic seconds)
        self._options, self._config_values = options, config_values
        self._payload, self._sent = payload, -1  # and the descriptor of the memory that holds it
        self._workers: WorkerProcesses | None = None

    def begin(self) -> None:
        """Prepare the directory and start the workers, which load while TRL sends its first weights.

        Raises:
            RunDirError: the directory is in use, or is no run directory.
        """
        options = self._options
        _give_up_the_dead(self.dir)
        state = prepare(
            self.dir.root,
            config=options.config,
            num_workers=len(options.worker_devices),
            workers_sharing=options.workers_sharing,
            generator=options.work.generator,
            config_values=self._config_values,
            resolved={_MARK: True, "worker_devices": list(options.worker_devices)},
        )
        if not self.lock.try_acquire({"role": "TRL's asynchronous trainer"}):
            raise RunDirError(in_use(self.dir))
        self.run_id, self._began = state.run_id, time.monotonic()
        activity.publish(self.dir.root, SERVER, device=options.master_device, run_id=self.run_id, state=LOADING)
        children = [
            worker_child(options, self.dir, number, device, lambda: not self.dir.has_ended())
            for number, device in enumerate(options.worker_devices, 1)
        ]
        if self._payload is not None:
            self._sent = in_memory(self._payload)
            place = {VARIABLE: f"/proc/{os.getpid()}/fd/{self._sent}"}
            children = [replace(child, env={**child.env, **place}) for child in children]
        if children:
            self._workers = WorkerProcesses(children)
        logger.info("the queue is {}. A worker started by hand: {}", self.dir.root, self.command())

    def command(self) -> str:
        """That starts one more worker, in a terminal of its own."""
        work, plain = self._options.work, WorkerSettings()
        given = {field.name for field in fields(work) if getattr(work, field.name) != getattr(plain, field.name)}
        device = ["--device", CPU] if self._options.master_device == CPU else []  # else the worker's default, GPU 1
        return shlex.join(
            ["async-grpo", "worker", "--run-dir", str(self.dir.root), *device, *as_flags(work, only=given)]
        )

    def check(self) -> None:
        """Raise `RunFailedError` where no worker of ours will serve the run any more."""
        if self._workers is not None:
            self._workers.check()

    def end(
        self, state: str, figures: Mapping[str, Any], write: Callable[[Callable[[], object]], object] = lambda do: do()
    ) -> None:
        """Write down how the run ended, and return when its processes are gone.

        Args:
            write: calls what writes a file, and may wait for room on the disk.
        """
        if not self.run_id:
            return
        activity.doing(ENDING)
        with ExitStack() as last:
            last.callback(self.lock.release)
            if self._sent >= 0:
                last.callback(os.close, self._sent)
            try:
                write(lambda: self.dir.update_state(of=self.run_id, state=state))  # workers by hand read it and end
            finally:
                restarts = self._workers.end() if self._workers is not None else 0
            process = {"state": state, "run_id": self.run_id, "server_pid": os.getpid(), "worker_restarts": restarts}
            seconds = round(time.monotonic() - self._began, 1)
            write(lambda: write_json(self.dir.summary, {**process, "wall_seconds": seconds, **figures}))


_MARK = "trl_async"  # in `run.json`: no process of ours resumes this run


def _give_up_the_dead(run: RunDir) -> None:
    """A run of this kind whose process was killed cannot be continued: let `prepare` move it aside."""
    with suppress(AsyncGRPOError):  # `prepare` says what is wrong with it
        old = run.read_state()
        if old is not None and old.state == runs.RUNNING and _MARK in old.resolved and not server_alive(run.root):
            run.update_state(of=old.run_id, state=runs.FAILED)


class WorkerProcesses:
    """Workers that a thread starts, watches, and starts again where they are killed.

    The thread lives as long as they do: the kernel ends them when the thread that started them is gone.
    """

    def __init__(self, children: list[Child]) -> None:
        self._logs = {child.name: LogTail(child.log, child.name) for child in children}
        self._supervisor = Supervisor(children, say=lambda said: logger.warning("{}", said))
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="rollout-workers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `RunFailedError` where a worker rejects its setup, or all have given up."""
        if self._error is not None:
            raise RunFailedError(f"The workers could not be started: {self._error}") from self._error
        exits = dict(self._supervisor.exits)
        refused = next((name for name, exit in exits.items() if exit.code == REFUSED and exit.starts == 1), "")
        if refused or len(exits) == len(self._logs):
            name = refused or next(iter(exits))
            what = (
                f"{name} rejected its setup"
                if refused
                else f"every worker failed {MAX_RESTARTS_IN_A_ROW + 1} times in a row"
            )
            raise RunFailedError(f"{what}. The last words of {self._logs[name].path}:\n{self._logs[name].last_words()}")

    def end(self) -> int:
        """Ask them to end, and wait until they are gone; returns how often one was started again."""
        self._supervisor.stop()
        self._thread.join()
        return sum(exit.starts - 1 for exit in self._supervisor.exits.values())

    def _watch(self) -> None:
        try:
            with self._supervisor as supervisor:
                supervisor.run_until(lambda exits: False)
        except Exception as error:  # noqa: BLE001 - a thread has no caller: `check` raises it in the main thread
            self._error = error
