"""Which process may use a run directory when, and what becomes of the run that a start finds in it.

`prepare` does what `preview` says. Both raise `RunDirError` with the same sentences.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from uuid import uuid4

from async_grpo.errors import RunDirError
from async_grpo.rundir import refusal
from async_grpo.rundir.files import free_name
from async_grpo.rundir.folders import check_folder, make_folder
from async_grpo.rundir.locks import KernelLock, server_alive, server_lock
from async_grpo.rundir.paths import (
    ENTRIES,
    FINISHED,
    RUNNING,
    SERVER,
    SERVER_LOCK,
    Accepted,
    RunDir,
    RunState,
    activity_file,
)
from async_grpo.rundir.run_plan import RunPlan

_BEFORE_A_RUN = re.compile(rf"{re.escape(SERVER_LOCK)}|\.run\.json\.[0-9a-f]{{32}}")  # what a killed `prepare` leaves


def prepare(root: Path, plan: RunPlan, *, say: Callable[[str], None] = lambda text: None) -> RunState:
    """Make `root` ready for a run and return its state, which is the old one's with another plan under `resume`.

    A finished run, or one that ended before its first step, is moved aside. An unfinished one is never touched
    unless the plan says how. A resume that the server refuses leaves the run as it was (`RunState.undo`).

    Args:
        say: takes a sentence about where an earlier run is now.

    Raises:
        RunDirError: the directory is in use, is not a run directory, or holds an unfinished run.
    """
    run = RunDir(root)
    check_folder(run.root)
    if not run.root.exists():
        _fate(run, resume=plan.training.resume, overwrite=plan.launch.overwrite)
        return _begin(run, plan)
    _refuse_foreign(run)
    with sole_user(run, "preparing a run"):
        fate = _fate(run, resume=plan.training.resume, overwrite=plan.launch.overwrite)
        if fate is Fate.RESUMED:
            return _resume(run, plan)
        if fate is Fate.MOVED_ASIDE:
            aside = _path_aside(run)
            run.root.rename(aside)
            say(f"the run that was in {run.root} is now in {aside}")
        if fate is Fate.OVERWRITTEN:
            _delete_run(run)
    return _begin(run, plan)


def _begin(run: RunDir, plan: RunPlan) -> RunState:
    make_folder(run.root)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    state = RunState(run_id=uuid4().hex[:12], state=RUNNING, started=now, plan=plan, **run.where_it_is())
    run.write_state(state)
    return state


def _resume(run: RunDir, plan: RunPlan) -> RunState:
    # Out of date: by it `status` would call the run dead until the next server starts.
    with suppress(IsADirectoryError, NotADirectoryError):  # the server will refuse it, and name it
        activity_file(run.root, SERVER).unlink(missing_ok=True)
        (run.root / refusal.FILE).unlink(missing_ok=True)
    old = run.read_state(accepted=True)
    assert old is not None, "it was there a moment ago, and nobody else may change it"
    now = replace(old, state=RUNNING, plan=plan, why="", undo=Accepted(old.state, old.plan))
    run.write_state(now)
    return now


class Fate(Enum):
    """What a start does with the run directory that it finds."""

    NEW = auto()
    RESUMED = auto()
    MOVED_ASIDE = auto()
    OVERWRITTEN = auto()


def preview(root: Path, *, resume: bool = False, overwrite: bool = False) -> tuple[Fate, Path]:
    """What `prepare` would do with the directory, and where its present contents would be then. Changes nothing.

    Raises:
        RunDirError: where `prepare` would, with the same text.
    """
    run = RunDir(root)
    check_folder(run.root)
    if run.root.exists():
        _refuse_foreign(run)
        if server_alive(run.root):
            raise RunDirError(in_use(run))
    fate = _fate(run, resume=resume, overwrite=overwrite)
    return fate, _path_aside(run) if fate is Fate.MOVED_ASIDE else run.root


def _fate(run: RunDir, *, resume: bool, overwrite: bool) -> Fate:
    old = run.read_state(accepted=True) if run.root.exists() else None
    if resume:
        if old is None:
            why = "holds no run" if run.root.exists() else "does not exist"
            raise RunDirError(
                f"Nothing to resume: {run.root} {why}. Name the run's --run-dir, or start without --resume."
            )
        return Fate.RESUMED
    if old is None:
        return Fate.NEW
    if is_over(old):
        return Fate.MOVED_ASIDE
    if overwrite:
        return Fate.OVERWRITTEN
    raise RunDirError(_unfinished(run, old))


def is_over(state: RunState) -> bool:
    """Whether nobody will continue the run: it has finished, or has ended before its first step."""
    return state.state == FINISHED or (state.state != RUNNING and state.step == 0)


@contextmanager
def sole_user(run: RunDir, role: str) -> Iterator[KernelLock]:
    """Hold the server's lock. `RunDirError` names the process that has it."""
    lock = server_lock(run.root)
    if not lock.try_acquire({"role": role}):
        raise RunDirError(in_use(run))
    with lock:
        yield lock


def in_use(run: RunDir) -> str:
    """A sentence that names the process which holds the run directory."""
    holder = server_lock(run.root).holder() or {}
    process = ", ".join(f"{key} {holder[key]}" for key in ("pid", "host", "since") if key in holder)
    return (
        f"{run.root} is in use by a live parameter server ({process or 'holder unknown'}). "
        "Wait for it, stop it, or choose another --run-dir."
    )


def _refuse_foreign(run: RunDir) -> None:
    if run.state_file.exists():
        return
    if strangers := [path.name for path in run.root.iterdir() if not _BEFORE_A_RUN.fullmatch(path.name)]:
        raise RunDirError(
            f"{run.root} is not a run directory: it holds {sorted(strangers)[0]!r} and no run.json. "
            "Choose another --run-dir; nothing was changed."
        )


def _unfinished(run: RunDir, old: RunState) -> str:
    return (
        f"{run.root} holds an unfinished run ({old.run_id}, {old.state}, step {old.step}, started {old.started}).\n"
        "Three ways out:\n"
        "  --resume          continue it\n"
        "  --run-dir OTHER   leave it alone and run elsewhere\n"
        "  --overwrite       delete its queue, logs and metrics (checkpoints stay) and start again"
    )


def _path_aside(run: RunDir) -> Path:
    """A free name next to the run directory, with the time of its last state."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.localtime(run.state_file.stat().st_mtime))
    return free_name(run.root.with_name(f"{run.root.name}-{stamp}"))


def _delete_run(run: RunDir) -> None:
    """`run.json` goes last: until then the directory is a run's, should this process be killed.

    `server.lock` stays: we hold it, and without the file two servers could start.
    """
    logs = [run.server_log.name, *(path.name for path in run.root.glob("log_worker_*.txt"))]
    last = run.state_file.name
    for name in (*(set(ENTRIES) - {SERVER_LOCK, last}), *logs, last):
        path = run.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
