"""Starts a run on this machine: one parameter server, some workers; watches them and ends all of them.

A dead worker is started again, with back-off; one that refuses its setup ends the run, as it would say the same again.
When the parameter server ends, everything ends, with its exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from async_grpo.errors import AsyncGRPOError
from async_grpo.formatting import counted
from async_grpo.launch.child_log import LogTail
from async_grpo.launch.screen import Screen, open_screen
from async_grpo.records import WorkerId
from async_grpo.rundir import paths as runs
from async_grpo.rundir import summary
from async_grpo.rundir.paths import RunDir, activity_file, prepare
from async_grpo.settings import TrainingSettings, WorkerSettings, as_flags
from async_grpo.setup.devices import CPU, threads_per_process
from async_grpo.setup.process import path_to_us
from async_grpo.telemetry.activity import read_activity
from async_grpo.telemetry.stalls import StallWatch, describe

GRACE_S = 9.0  # what is not gone this long after it was asked to end is killed: a run ends within 10 s
MAX_RESTARTS_IN_A_ROW = 5
LIVED_LONG_ENOUGH_S = 60.0  # a worker that lived this long starts counting its restarts anew
POLL_S = 0.1
REFUSED = AsyncGRPOError.exit_code  # of a process that cannot use its options, its setup file or what is installed


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the command line decides about a distributed run."""

    config: Path
    run_dir: Path
    master_device: str
    worker_devices: Sequence[str]
    training: TrainingSettings
    work: WorkerSettings
    accelerate_config: Path | None = None  # the server is several processes, as this file says
    overwrite: bool = False
    worker_timeout_s: float = 600.0
    log_level: str = "INFO"
    quiet: bool = False  # only warnings, errors and the table at the end

    @property
    def workers_sharing(self) -> int:
        """How many workers are on the server's device, and read its weights in place."""
        return sum(device == self.master_device for device in self.worker_devices)

    def threads(self, env: Mapping[str, str]) -> str | None:
        """`OMP_NUM_THREADS` of each process; None: left to torch, which takes a thread for each core."""
        if self.training.deterministic:
            return "1"
        on_cpu = [device for device in (self.master_device, *self.worker_devices) if device == CPU]
        if on_cpu and "OMP_NUM_THREADS" not in env:
            return str(threads_per_process(len(on_cpu)))
        return env.get("OMP_NUM_THREADS")


def launch(options: LaunchOptions) -> int:
    """Run to the end; returns 0 for a run that finished or was asked to stop, the server's exit code otherwise."""
    prepare(
        options.run_dir,
        config=options.config,
        resume=options.training.resume,
        overwrite=options.overwrite,
        num_workers=len(options.worker_devices),
        workers_sharing=options.workers_sharing,
        deterministic=options.training.deterministic,
    )
    return _Launcher(options).run()


@dataclass(slots=True)
class _Child:
    """One process of the run, and what is needed to start it again."""

    name: str
    command: list[str]
    log: LogTail
    stall: StallWatch | None = None
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    starts: int = 0
    restart_at: float | None = None  # monotonic seconds; None while it runs
    restarts_in_a_row: int = 0
    ended_for_good: bool = False
    count_at_start: bytes | None = None  # of its progress

    def refused(self) -> bool:
        """Whether it ended over its setup the first time that it was started.

        One that is started again has begun before with the same setup: what it minds then may pass.
        """
        return self.starts == 1 and self.process is not None and self.process.returncode == REFUSED

    def was_killed_at_work(self) -> bool:
        """Whether somebody else ended it, after it had begun to work: no fault of its own."""
        killed = self.process is not None and self.process.returncode == -signal.SIGKILL
        return killed and self.stall is not None and self.stall.count() != self.count_at_start

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(slots=True)
class _Launcher:
    options: LaunchOptions
    stopping: bool = False
    restarts: int = 0
    gave_up: str = ""
    refused_by: _Child | None = None
    children: list[_Child] = field(default_factory=list)
    screen: Screen = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        self.screen = open_screen(options.run_dir, quiet=options.quiet, verbose=options.log_level == "DEBUG")

    def run(self) -> int:
        run = RunDir(self.options.run_dir)
        server = _Child(name="server", command=self._server_command(), log=LogTail(run.server_log, "server"))
        workers = [
            self._worker(run, number, device) for number, device in enumerate(self.options.worker_devices, start=1)
        ]
        self.children = [server, *workers]
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "stopping", True))
        self.screen.say(
            f"run {run.root}: server on {self.options.master_device}, {counted(len(workers), 'worker')} on "
            f"{', '.join(self.options.worker_devices)}; logs beside the queue"
        )
        with self.screen:
            try:
                for child in self.children:
                    self._start(child)
                self._watch(server, workers)
            finally:
                self._end_all()
        return self._conclude(run, server)

    def _worker(self, run: RunDir, number: int, device: str) -> _Child:
        worker = WorkerId(number)
        return _Child(
            name=f"worker {number}",
            command=self._worker_command(number, device),
            log=LogTail(run.worker_log(worker), f"worker {number}"),
            stall=StallWatch(run.root, worker, self.options.worker_timeout_s),
        )

    def _server_command(self) -> list[str]:
        options = self.options
        arguments = ["server", "--config", str(options.config), "--device", options.master_device]
        arguments += [*as_flags(options.training), *self._common()]
        if options.accelerate_config is None:
            return _command(arguments)
        config = str(options.accelerate_config)
        return [sys.executable, "-m", "async_grpo.launch.accelerate_entry", str(os.getpid()), config, *arguments]

    def _worker_command(self, number: int, device: str) -> list[str]:
        options = self.options
        arguments = ["worker", "--config", str(options.config), "--device", device, "--id", str(number)]
        return _command([*arguments, *as_flags(options.work), *self._common()])

    def _common(self) -> list[str]:
        return ["--run-dir", str(self.options.run_dir), "--log-level", self.options.log_level]

    def _start(self, child: _Child) -> None:
        env = dict(os.environ)
        env["PYTHONPATH"] = path_to_us(env)
        env["PYTHONUNBUFFERED"] = "1"
        env.setdefault("TQDM_DISABLE", "1")
        threads = self.options.threads(env)
        if threads is not None:
            env["OMP_NUM_THREADS"] = threads
        with child.log.path.open("ab") as log:
            child.process = subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        child.started = time.monotonic()
        child.starts += 1
        child.count_at_start = child.stall.count() if child.stall is not None else None
        child.restart_at = None

    def _watch(self, server: _Child, workers: list[_Child]) -> None:
        """Until the server has ended, a stop was asked for, or the workers cannot work."""
        while server.running and not self.stopping:
            self._show_logs()
            for worker in workers:
                self._mind(worker)
            if self.refused_by is not None:
                return
            if all(worker.ended_for_good for worker in workers):
                self.gave_up = f"every worker failed {MAX_RESTARTS_IN_A_ROW + 1} times in a row"
                return
            time.sleep(POLL_S)

    def _mind(self, worker: _Child) -> None:
        now = time.monotonic()
        if worker.running:
            self._end_if_hung(worker)
        elif worker.ended_for_good or self._run_is_over():
            return
        elif worker.refused():
            self.refused_by = worker
        elif worker.restart_at is None:
            if now - worker.started > LIVED_LONG_ENOUGH_S or worker.was_killed_at_work():
                worker.restarts_in_a_row = 0
            worker.ended_for_good = worker.restarts_in_a_row >= MAX_RESTARTS_IN_A_ROW
            worker.restart_at = now + 2.0**worker.restarts_in_a_row
        elif now >= worker.restart_at:
            assert worker.process is not None
            self.screen.warn(f"{worker.name} ended ({_exit_reason(worker.process.returncode)}); starting it again")
            worker.restarts_in_a_row += 1
            self.restarts += 1
            self._start(worker)

    def _run_is_over(self) -> bool:
        """The server has said so, and is ending: no worker is needed any more."""
        state = RunDir(self.options.run_dir).read_state()
        return state is not None and state.state != runs.RUNNING

    def _end_if_hung(self, worker: _Child) -> None:
        assert worker.stall is not None
        if worker.stall.is_hung():
            assert worker.process is not None
            doing = read_activity(activity_file(self.options.run_dir, str(worker.stall.worker)))
            it_was = f" (it was {describe(doing, time.monotonic())})" if doing is not None else ""
            self.screen.warn(
                f"{worker.name} made no progress for {self.options.worker_timeout_s:g} s: killing it{it_was}"
            )
            worker.process.kill()
            worker.process.wait()

    def _end_all(self) -> None:
        """Ask every child to end, then make it: none is left behind. Only the pids that were started are signalled."""
        deadline = time.monotonic() + GRACE_S
        if self.stopping:
            self.screen.warn("stopping: a checkpoint is written, then everything ends")
        if self.refused_by is not None:
            self.screen.warn(f"{self.refused_by.name} refused its setup, and would again: everything ends")
        server = self.children[0].process
        finished = server is not None and server.poll() == 0 and not self.stopping
        if not finished:  # else the workers read in run.json that the run has ended
            self._signal_all(signal.SIGTERM)
        while any(child.running for child in self.children) and time.monotonic() < deadline:
            self._show_logs()
            time.sleep(POLL_S)
        self._signal_all(signal.SIGKILL)
        for child in self.children:
            if child.process is not None:
                child.process.wait()
        self._show_logs()

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.process is not None and child.running:
                child.process.send_signal(number)

    def _show_logs(self) -> None:
        for child in self.children:
            self.screen.show(child.log.new_lines())
        self.screen.refresh()

    def _conclude(self, run: RunDir, server: _Child) -> int:
        assert server.process is not None
        code = server.process.returncode
        summary.add(run.summary, server_pid=server.process.pid, worker_restarts=self.restarts)
        if self.gave_up:
            self.screen.warn(f"gave up: {self.gave_up}. The last words of {self.children[1].log.path.name}:")
            print(self.children[1].log.last_words(), file=sys.stderr)
            return 1
        state = run.read_state()
        if self.refused_by is not None:
            begun = state is not None and (state.step > 0 or state.state == runs.RUNNING)
            again = f"go on: {summary.next_command(runs.STOPPED, run)}" if begun else "start again"
            self.screen.warn(f"Mend what {self.refused_by.name} says, then {again}")
            print(self.refused_by.log.last_words(), file=sys.stderr)
            return REFUSED
        if self.stopping and code == -signal.SIGKILL:
            self.screen.warn(
                f"the parameter server did not end in {GRACE_S:g} s and was killed: --resume goes on from a checkpoint"
            )
            return 0
        if code != 0 and not (self.stopping and state is not None and state.state != runs.FAILED):
            self.screen.warn(f"the parameter server failed ({_exit_reason(code)}). Its last words:")
            print(server.log.last_words(), file=sys.stderr)
            return code if code > 0 else 1
        summary.show(run)
        return 0


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "async_grpo.cli", *arguments, "--launched-by", str(os.getpid())]


def _exit_reason(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
