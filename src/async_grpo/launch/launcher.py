"""One run on this machine: the processes of its parameter server and workers, and what their exits mean.

If a worker rejects its setup at its first start, the run ends: every other start would fail as well. The exit code of
the parameter server is that of the run.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_grpo.archive import checkpoint_folders
from async_grpo.errors import MOST_OF_A_REASON, AsyncGRPOError, BadFileError, DiskFullError, RunDirError
from async_grpo.formatting import counted
from async_grpo.launch.child_log import LogTail, last_line
from async_grpo.launch.host_memory import MemoryWatch, crowding, require_memory
from async_grpo.launch.screen import open_screen
from async_grpo.launch.supervisor import MAX_RESTARTS_IN_A_ROW, Child, Exit, Exits, Restart, Supervisor, exit_reason
from async_grpo.records import WorkerId
from async_grpo.rundir import paths as runs
from async_grpo.rundir import summary
from async_grpo.rundir.folder_watch import FolderWatch
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import SERVER, RunDir
from async_grpo.rundir.refusal import read_refusal
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import STOP_GRACE_S, log_level
from async_grpo.setup.devices import CPU, threads_per_process
from async_grpo.setup.generated import sent_function
from async_grpo.setup.output import survive_lost_output
from async_grpo.setup.process import StopRequest, ignore_stacks_signal, path_to_us
from async_grpo.telemetry.nodes_file import all_gone, read_nodes
from async_grpo.telemetry.stalls import HangDetector

NODES = "nodes"  # the process that claims for other machines, as a child
GRACE_OF_OTHERS_S = 20.0  # more than others get, for a process that ends those of other machines
NOTHING_TRAINED = 130  # a stop before the first step; what a shell shows for a program that SIGINT ended
REFUSED = AsyncGRPOError.exit_code  # of a process that cannot use its options, its setup file or what is installed


def launch(root: Path, plan: RunPlan) -> int:
    """Run to the end; returns 0 for a run that finished or was asked to stop, the server's exit code otherwise.

    A run that was asked to stop before its first step is `NOTHING_TRAINED`.
    """
    stop = StopRequest().install()
    stop.defer()
    ignore_stacks_signal()
    survive_lost_output()
    require_memory(plan.num_workers)
    state = prepare(root, plan, say=lambda text: print(f"[launcher] {text}", flush=True))
    run = RunDir(root)
    try:
        return _Launch(plan, run, state.run_id).run(stop)
    except AsyncGRPOError:
        with suppress(AsyncGRPOError, OSError):  # the first error is the one to be told
            run.take_back_resume(state.run_id)
        raise


class _Launch:
    """One run, from the start of its processes to its exit code."""

    def __init__(self, plan: RunPlan, run: RunDir, run_id: str) -> None:
        self._plan, self._run, self._run_id = plan, run, run_id
        self._has_lost_nodes = False
        self._folder, self._memory = FolderWatch(run.root), MemoryWatch()
        needed = self._needs_workers
        for machines in (run.nodes, run.ranks):  # of the run that this one resumes
            machines.unlink(missing_ok=True)
        env = environment(plan)
        workers = [worker_child(plan, run, number, needed, env) for number in range(1, plan.num_workers + 1)]
        if plan.launch.ray is not None:
            workers.append(_gate(plan, run, needed, env))
        children = [_server(plan, run), *workers]
        self._workers = [worker.name for worker in workers]
        self._logs = {child.name: LogTail(child.log, child.name) for child in children}
        self._screen = open_screen(
            run.root,
            [*self._logs.values()],
            quiet=plan.launch.quiet,
            verbose=log_level(plan.launch.log_level) == "DEBUG",
        )
        self._supervisor = Supervisor(children, say=self._screen.warn, look=self._screen.refresh)

    def run(self, asked_to_stop: StopRequest) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._supervisor.stop)
        if asked_to_stop.requested:
            self._supervisor.stop()
        devices, launch = self._plan.worker_devices, self._plan.launch
        names = ", ".join(dict.fromkeys(devices))
        here = f"{counted(len(devices), 'worker')} on {names}" if devices else "no worker here"
        others = f", {launch.nodes - 1 if launch.nodes else 'all'} other nodes on Ray" if launch.ray else ""
        self._screen.say(
            f"run {self._run.root}: server on {self._plan.master_device}, {here}{others}; logs in the same directory"
        )
        if crowd := crowding(len(devices)):
            self._screen.warn(crowd)
        with self._screen, self._supervisor as supervisor:
            exits = dict(supervisor.run_until(self._is_over))
            if supervisor.stopping:
                trains = self._run.consumption.exists()
                self._screen.stops(f"{'a checkpoint is written, then ' if trains else ''}everything ends")
            elif refused := self._refused(exits):
                self._screen.warn(f"{refused} rejected its setup, so the run ends")
            finished = SERVER in exits and exits[SERVER].code == 0 and not supervisor.stopping
            # The workers of a finished run read in run.json that it has ended. Those of a deterministic one that is
            # stopped finish the groups that only this version of the weights may sample.
            first = (SERVER,) if supervisor.stopping and self._plan.training.deterministic else ()
            supervisor.end(ask=not finished, first=first)
        server = supervisor.exits[SERVER]
        restarts = sum(exit.starts - 1 for exit in supervisor.exits.values())
        with suppress(DiskFullError):  # the table lacks one figure
            lost = [f"{name} ({exit_reason(code)})" for name, code in supervisor.died.items() if name != SERVER]
            figures = {"worker_restarts": restarts, "workers_lost": lost, **self._node_figures()}
            summary.add(self._run.summary, server_pid=server.pid, **figures)
        return self._conclude(exits, server)

    def _node_figures(self) -> dict[str, Any]:
        """What other machines were there, for the summary."""
        record = read_nodes(self._run.nodes) if self._plan.launch.ray is not None else None
        if record is None:
            return {}
        names = [node.name for node in record.nodes]
        return {"nodes": names, "node_restarts": record.losses, "node_bytes": record.bytes}

    def _is_over(self, exits: Exits) -> bool:
        here = self._plan.num_workers
        if NODES in exits and here and not self._has_lost_nodes and SERVER not in exits:
            self._has_lost_nodes = True
            why = last_line(self._logs[NODES].last_words()).removeprefix("error: ")
            go_on = f"{counted(here, 'local worker')} continue{'s' * (here == 1)}"
            self._screen.warn(f"the other nodes are given up, {go_on} without them. {why}")
            with suppress(AsyncGRPOError, OSError):  # it is for `status` and metrics
                all_gone(self._run.nodes, f"is given up. {why}")
        return SERVER in exits or bool(self._refused(exits)) or self._all_gave_up(exits)

    def _needs_workers(self) -> bool:
        return not self._folder.trouble() and not self._run.has_ended()

    def _refused(self, exits: Exits) -> str:
        """The worker that refused its setup at its first start, if one did while the server ran."""
        ended = [name for name in self._workers if name in exits and SERVER not in exits]
        return next((name for name in ended if exits[name].code == REFUSED and exits[name].starts == 1), "")

    def _all_gave_up(self, exits: Exits) -> bool:
        return SERVER not in exits and all(name in exits for name in self._workers)

    def _conclude(self, exits: Exits, server: Exit) -> int:
        """Say how the run ended; returns the exit code. `exits`: before the launcher ended the rest."""
        stopping = self._supervisor.stopping
        if stopping and server.code in (0, -signal.SIGTERM):
            self._write_down_the_stop()
        state = self._run.read_state()
        if refused := self._refused(exits):
            begun = state is not None and (state.step > 0 or state.state == runs.RUNNING)
            again = f"continue: {summary.next_command(runs.STOPPED, self._run)}" if begun else "start again"
            return self._fail(
                f"Fix the error reported by {refused}, then {again}", refused, REFUSED, why=f"{refused}: "
            )
        if self._all_gave_up(exits):
            first = self._workers[0]
            why = f"every worker failed {MAX_RESTARTS_IN_A_ROW + 1} times in a row"
            said = f"The last words of {self._logs[first].path.name}:"
            code = self._fail(f"gave up: {why}. {said}", first, why=f"{why}: ")
            self._say_how_to_continue()
            return code
        if stopping and server.code == -signal.SIGKILL:
            self._screen.warn(
                f"the parameter server did not end in {self._plan.launch.stop_grace:g} s (--stop-grace) and was "
                "killed: --resume continues from a checkpoint"
            )
            return 0
        if server.code != 0 and not (stopping and state is not None and state.state != runs.FAILED):
            return self._server_failed(server)
        if self._plan.models:
            return 0
        if stopping and state is not None and state.state == runs.STOPPED and state.step == 0:
            self._screen.warn("stopped, nothing was trained")
            return NOTHING_TRAINED
        summary.show(self._run)
        return 0

    def _write_down_the_stop(self) -> None:
        """Where the server ended before it could: else the run would be starting for ever."""
        with suppress(RunDirError):
            if not self._run.take_back_resume(self._run_id) and self._run.state_of(self._run_id).state == runs.RUNNING:
                self._run.update_state(of=self._run_id, state=runs.STOPPED)

    def _server_failed(self, server: Exit) -> int:
        """Say why, with its last messages, and how to continue a run that had begun to train."""
        why = exit_reason(server.code)
        if server.code == -signal.SIGKILL:
            why += f", {self._memory.verdict()}"
        if server.code < 0:
            self._note_why(f"the parameter server was {why}")
        said = f"the parameter server failed ({why}). Its last words:"
        with suppress(BadFileError):
            if server.code == REFUSED and (refusal := read_refusal(self._run.root)) is not None:
                said = f"{refusal.worker} cannot do what the setup file asks for, so the run ends"
        code = self._fail(said, SERVER, max(server.code, 1), was_killed=server.code < 0)
        self._say_how_to_continue()
        return code

    def _say_how_to_continue(self) -> None:
        if self._has_checkpoint() and not self._plan.models:
            self._screen.warn(f"to continue the run: {summary.next_command(runs.STOPPED, self._run)}")

    def _has_checkpoint(self) -> bool:
        with suppress(RunDirError, OSError):
            state = self._run.state_of(self._run_id)
            return bool(state.output_dir) and bool(checkpoint_folders.of_run(Path(state.output_dir), self._run_id))
        return False

    def _note_why(self, why: str) -> None:
        """Write why the run failed where its own processes could not."""
        with suppress(AsyncGRPOError, OSError):
            self._run.update_state(of=self._run_id, why=why[:MOST_OF_A_REASON])

    def _fail(self, said: str, name: str, code: int = 1, *, was_killed: bool = False, why: str = "") -> int:
        """Say why; `why` begins the reason that `run.json` gets, and the words of the process end it."""
        if trouble := self._folder.trouble():
            self._screen.warn(trouble)
        words = self._logs[name].last_words(was_killed=was_killed)
        if why:
            self._note_why(why + last_line(words).removeprefix("error: "))
        if code == REFUSED:  # the words are the refusal, and all that the caller of a run is told
            self._screen.warn(said)
            print(words, file=sys.stderr)
        else:
            print(f"[launcher] {said}\n{words}", file=sys.stderr)
        return code


def _server(plan: RunPlan, run: RunDir) -> Child:
    grace_s, env = plan.launch.stop_grace, environment(plan)
    command = _command("server", run)
    if plan.launch.accelerate_config is not None:
        entry = "async_grpo.nodes.ranks" if plan.launch.trainer_nodes > 1 else "async_grpo.launch.accelerate_entry"
        command = [sys.executable, "-Pm", entry, str(os.getpid()), str(run.root), "server", "--run-dir", str(run.root)]
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_s))  # else it kills ranks after 30 s
    more_s = GRACE_OF_OTHERS_S if plan.launch.trainer_nodes > 1 else 0.0
    return Child(name=SERVER, command=command, env=env, log=run.server_log, grace_s=grace_s + more_s)


def _gate(plan: RunPlan, run: RunDir, needed: Callable[[], bool], env: dict[str, str]) -> Child:
    """The process that claims for workers of other machines."""
    return Child(
        name=NODES,
        command=_command("nodes", run),
        env=env,
        log=run.nodes_log,
        grace_s=plan.launch.stop_grace + GRACE_OF_OTHERS_S,
        restart=Restart(unless_first_exit=REFUSED, while_needed=needed),
    )


def worker_child(plan: RunPlan, run: RunDir, number: int, needed: Callable[[], bool], env: dict[str, str]) -> Child:
    """The process of worker `number`. `needed`: whether it is to be started again when it has ended."""
    worker = WorkerId(number)
    return Child(
        name=f"worker {number}",
        command=[*_command("worker", run), "--id", str(number)],
        env=env,
        log=run.worker_log(worker),
        grace_s=min(STOP_GRACE_S, plan.launch.stop_grace),
        restart=Restart(unless_first_exit=REFUSED, while_needed=needed),
        health=HangDetector(run.root, worker, plan.launch.worker_timeout, tool_timeout_s=plan.work.tool_timeout),
    )


def _command(role: str, run: RunDir) -> list[str]:
    """Start a process of the run, which reads in the run directory what it is to do."""
    command = [sys.executable, "-Pm", "async_grpo.cli", role, "--run-dir", str(run.root)]
    return [*command, "--launched-by", str(os.getpid())]


def environment(plan: RunPlan) -> dict[str, str]:
    """What the processes of a run find in their environment."""
    env = dict(os.environ)
    env["PYTHONPATH"] = path_to_us(env)
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TQDM_DISABLE", "1")
    sent_function.pass_on(env)
    count = threads(plan, env)
    return env if count is None else {**env, "OMP_NUM_THREADS": count}


def threads(plan: RunPlan, env: Mapping[str, str]) -> str | None:
    """`OMP_NUM_THREADS` of each process; None: left to torch, which takes a thread for each core."""
    if plan.training.deterministic:
        return "1"
    on_cpu = (plan.master_device, *plan.worker_devices).count(CPU)
    if on_cpu and "OMP_NUM_THREADS" not in env:
        return str(threads_per_process(on_cpu))
    return env.get("OMP_NUM_THREADS")
