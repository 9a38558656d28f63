"""Runs the commands of a queue as jobs of SLURM, which submitit submits.

submitit pickles a `ClusterCommand` into its folder, and the job unpickles it; so nobody else may write there. This side
unpickles nothing: the exit code is in a file of ours, and of submitit only whether a job has ended is asked. A job has
the name of its attempt, which is on disk before the job is, so that a later process finds and ends what a killed one
has left.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from async_grpo.errors import AsyncGRPOError, BadFileError, UsageError
from async_grpo.launch.supervisor import Exit, Exits, Health
from async_grpo.rundir.files import write_json
from async_grpo.rundir.folders import check_folder, make_folder
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import shaped
from async_grpo.setup.process import has_ended, start_logged, within
from async_grpo_experiments.slots.starter import LOST, PlacedChild, held_by_us

LOOK_S = 0.1
ASK_S = 2.0  # between two looks at the files of the jobs
END_WAIT_S = 300.0  # for a job that was cancelled: SLURM gives it KillWait, 30 s by default, and cleans up after it
BEFORE_LIMIT_S = 90  # the signal comes so long before the time limit
PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "sacct", "scontrol")


class ClusterError(AsyncGRPOError):
    """A job could not be submitted, or does not end."""


class ClusterCommand:
    """A command line, run where the cluster has put it, and again after its time limit.

    Args:
        env: what its environment has besides that of the job.
        log: what it prints is appended to it.
        code_file: gets its exit code.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, code_file: Path, *, grace_s: float
    ) -> None:
        self._command, self._env, self._log, self._code_file = list(command), dict(env), log, code_file
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        self._process = start_logged([*held_by_us(), *self._command], {**os.environ, **self._env}, self._log)
        while self._process.poll() is None:  # not `wait`: `checkpoint` interrupts this, and may not wait for its lock
            time.sleep(LOOK_S)
        write_json(self._code_file, {"code": self._process.returncode})

    def checkpoint(self) -> Any:
        """End the process, as the time limit or another job comes, and have submitit queue the command again.

        submitit calls it from a signal handler.
        """
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            within(self._grace_s, partial(has_ended, self._process), LOOK_S)
            self._process.kill()
        return DelayedSubmission(
            ClusterCommand(self._command, self._env, self._log, self._code_file, grace_s=self._grace_s)
        )


class SlurmStarter:
    """A `Starter` of jobs.

    Args:
        folder: submitit's; the cluster's nodes see it by the same path.
        parameters: of a job, by the names of submitit's `AutoExecutor`.
        cluster: `local`: submitit's own stand-in for a cluster, on this machine.
    """

    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, Any],
        *,
        say: Callable[[str], None],
        look: Callable[[], None],
        cluster: str = "slurm",
    ) -> None:
        import submitit

        check_folder(folder)
        self._folder = make_folder(folder)
        self._parameters, self._say, self._look = dict(parameters), say, look
        self._executor, self._is_slurm = submitit.AutoExecutor(folder, cluster=cluster), cluster == "slurm"
        self._jobs: dict[str, Any] = {}  # by the child's name, submitit's
        self._code_files: dict[str, Path] = {}
        self._health: dict[str, Health] = {}
        self._hanging: set[str] = set()
        self._stopping = False
        self._next_ask = 0.0  # monotonic
        self.exits: dict[str, Exit] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        running = [name for name in self._jobs if name not in self.exits]
        for name in running:
            self._jobs[name].cancel(check=False)
        deadline = time.monotonic() + END_WAIT_S
        while running and time.monotonic() < deadline:
            running = [name for name in running if not self._has_ended(name)]
            time.sleep(LOOK_S)
        for name in running:
            self._say(f"{name}: job {self._jobs[name].job_id} was cancelled, and has not ended in {END_WAIT_S:g} s")
        self._look()

    def add(self, child: PlacedChild) -> int:
        """Submit a child. `ClusterError`: SLURM does not take it."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        more = {name: value for name, value in child.env.items() if os.environ.get(name) != value}
        more.pop("CUDA_VISIBLE_DEVICES", None)  # the cluster says which
        code_file = self._folder / f"{child.attempt}.json"
        command = ClusterCommand(child.command, more, child.log.absolute(), code_file.absolute(), grace_s=child.grace_s)
        self._executor.update_parameters(
            **self._parameters, name=child.attempt, slurm_signal_delay_s=BEFORE_LIMIT_S, stderr_to_stdout=True
        )
        try:
            job = self._executor.submit(command)
        except (FailedJobError, FailedSubmissionError) as error:
            raise ClusterError(f"SLURM does not take the job: {error}") from error
        self._jobs[child.name], self._code_files[child.name] = job, code_file
        if child.health is not None:
            self._health[child.name] = child.health
        self._say(f"{child.name} is job {job.job_id}, {child.attempt}")
        return 0

    def forget(self, name: str) -> None:
        del self.exits[name], self._jobs[name], self._code_files[name]
        self._health.pop(name, None)
        self._hanging.discard(name)

    def stop(self) -> None:
        self._stopping = True

    def hurry(self) -> None:
        """Nothing: SLURM itself kills what does not end."""

    def run_until(self, first_exit: Callable[[Exits], bool]) -> Exits:
        while not self._stopping and not first_exit(self.exits):
            self._look()
            if time.monotonic() >= self._next_ask:
                self._next_ask = time.monotonic() + ASK_S
                for name in [name for name in self._jobs if name not in self.exits]:
                    if not self._has_ended(name):
                        self._end_hanging(name)
            time.sleep(LOOK_S)
        return self.exits

    def _end_hanging(self, name: str) -> None:
        if name not in self._health or self._jobs[name].state != "RUNNING":
            return
        if why := self._health[name].hang(0):
            if name not in self._hanging:
                self._say(f"cancelling {name}: {why}")
            self._hanging.add(name)
            self._jobs[name].cancel(check=False)  # again at the next look, if SLURM did not take it

    def _has_ended(self, name: str) -> bool:
        ended = self._jobs[name].done()
        code = LOST  # asked for after the state: a job writes its code before it ends
        with suppress(FileNotFoundError, BadFileError):
            code = shaped(int, read_object(self._code_files[name]).get("code"))
        if ended and code == LOST and self._is_slurm and _queued({self._code_files[name].stem}):
            self._jobs[name].cancel(check=False)  # SLURM would start it again beside our next attempt
            return False
        if ended:
            self.exits[name] = Exit(code, 0, 1)
        return bool(ended)


def check_cluster() -> None:
    """`UsageError` where no job can be submitted."""
    if find_spec("submitit") is None:
        raise UsageError("Jobs of SLURM need submitit: pip install 'async-grpo[slurm]', or set system.engine=local.")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise UsageError(
            f"There is no {missing[0]} here: start this on a machine of the cluster, or set system.engine=local."
        )


def end_jobs(attempts: Collection[str], say: Callable[[str], None]) -> None:
    """Cancel the jobs of these attempts, and return when none is left. `ClusterError`: one does not end."""
    left = _queued(attempts)
    if not left:
        return
    say(f"cancelling the jobs that the killed runner has left: {', '.join(sorted(left))}")
    deadline = time.monotonic() + END_WAIT_S
    for name in left:
        subprocess.run(["scancel", f"--user={getpass.getuser()}", f"--name={name}"], check=False)
    while left := _queued(attempts):
        if time.monotonic() > deadline:
            raise ClusterError(f"The job {min(left)} was cancelled and has not ended in {END_WAIT_S:g} s: see squeue.")
        time.sleep(ASK_S)


def _queued(attempts: Collection[str]) -> set[str]:
    """Return the attempts whose jobs wait, run or end just now."""
    if not attempts:
        return set()
    command = ["squeue", "--noheader", f"--user={getpass.getuser()}", "--format=%j", f"--name={','.join(attempts)}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(
            f"It cannot be seen whether jobs of an earlier runner still write here ({error}): start this on a machine "
            "of the cluster."
        ) from error
    return {*attempts} & {*found.stdout.split()}
