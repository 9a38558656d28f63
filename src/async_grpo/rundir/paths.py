"""Every path of a run directory, and who may use the directory when.

worker/
  run.json                      run id, state, setup file; written by the parameter server
  server.lock                   kernel lock: one parameter server at a time
  generator.lock                kernel lock: one worker that feeds a vLLM server, where there is one
  queue/ done/ quarantine/ tmp/ alive/        the job queue
  ps_ipc_handle.json            where the weights lie (ps_ipc_handle_version.json: for people)
  log_parameter_server.txt  log_worker_1.txt  metrics.jsonl  consumed.jsonl  summary.json  tensorboard/
  hyperparameters.json          what the trainer was set to; no secrets
  board/                        what `async-grpo board` made of the files above
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from pathlib import Path
from uuid import uuid4

from async_grpo.errors import DiskFullError, RunDirError
from async_grpo.records import WorkerId
from async_grpo.rundir.locks import KernelLock

SERVER = "server"  # the parameter server, as a process of the run
FORMAT = 1
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
_ENTRIES = (
    *("queue", "done", "quarantine", "tmp", "alive", "tensorboard", "board", "summary.json", "metrics.jsonl"),
    *("consumed.jsonl", "hyperparameters.json"),
    *("run.json", "server.lock", "generator.lock", "ps_ipc_handle.json", "ps_ipc_handle_version.json"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What `run.json` holds. Wall-clock times are for people; nothing compares them."""

    run_id: str
    state: str  # running, finished, stopped, failed
    config: str  # the setup file, absolute
    started: str  # when, for people
    step: int = 0  # optimizer steps done when the state was written
    output_dir: str = ""  # where the checkpoints are, absolute; empty until the trainer is built
    deterministic: bool = False
    correction: str = "bypass"  # of the process that trained last
    seed: int | None = None  # that the command line gave, if it gave one
    num_workers: int = 0  # how many workers the launcher starts; 0 when started by hand
    workers_sharing: int = 0  # of them, those on the server's device: they read its weights in place
    format: int = FORMAT


def activity_file(root: Path, name: str) -> Path:
    """Where process `name` of the run in `root` says what it does."""
    return root / "alive" / f"{name}.status"


class RunDir:
    """The run directory at `root`, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.state_file = self.root / "run.json"
        self.lock = self.root / "server.lock"
        self.generator_lock = self.root / "generator.lock"
        self.metrics = self.root / "metrics.jsonl"
        self.consumption = self.root / "consumed.jsonl"
        self.summary = self.root / "summary.json"
        self.tensorboard = self.root / "tensorboard"
        self.hyperparameters = self.root / "hyperparameters.json"
        self.board = self.root / "board"

    @property
    def weights_handle(self) -> Path:
        """Where the weights are published; `CUDA_IPC_HANDLE_PATH` overrides it."""
        return Path(os.environ.get("CUDA_IPC_HANDLE_PATH") or self.root / "ps_ipc_handle.json").absolute()

    @property
    def server_stacks(self) -> Path:
        """Where the parameter server writes its stacks when it is asked to (`process.write_stacks_on_signal`)."""
        return self.root / "alive" / "server.stacks"

    def rank_stacks(self, rank: int) -> Path:
        """The same of another rank of the trainer."""
        return self.root / "alive" / f"rank{rank}.stacks"

    def worker_stacks(self, worker: WorkerId) -> Path:
        return self.root / "alive" / f"{worker}.stacks"

    def worker_engine(self, worker: WorkerId) -> Path:
        """The folder from which a worker's vLLM engine is built; it exists only meanwhile."""
        return self.root / "alive" / f"{worker}.engine"

    @property
    def server_log(self) -> Path:
        return self.root / "log_parameter_server.txt"

    def worker_log(self, worker: WorkerId) -> Path:
        return self.root / f"log_worker_{worker.number}.txt"

    def read_state(self) -> RunState | None:
        """The contents of `run.json`, or None where there is none.

        Raises `RunDirError` when it is of another format or no JSON.
        """
        try:
            data = json.loads(self.state_file.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunDirError(f"{self.state_file} is no JSON ({error}). Choose another --run-dir.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise RunDirError(
                f"{self.state_file} was written by another version of Async-GRPO. Choose another --run-dir."
            )
        try:
            return RunState(**data)
        except TypeError as error:
            raise RunDirError(
                f"{self.state_file} is no record of a run ({error}). Choose another --run-dir."
            ) from error

    def write_state(self, state: RunState) -> None:
        write_json(self.state_file, asdict(state))

    def update_state(self, **changes: object) -> RunState:
        """Change some fields of `run.json`; returns what is there now."""
        current = self.read_state()
        if current is None:
            raise RunDirError(f"{self.state_file} has vanished while the run was going on.")
        changed = replace(current, **changes)  # type: ignore[arg-type]  # field names are checked by replace()
        self.write_state(changed)
        return changed


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """An empty folder for as long as the block lasts. What a killed process left there before is removed, too."""
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(mode=0o700, parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def write_json(path: Path, data: object) -> None:
    """Write a JSON file that appears whole or not at all. `DiskFullError` if there is no room for it."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        temporary.write_text(json.dumps(data, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(f"The disk is full: no room for {path}. Make room, then go on with --resume.") from error


def prepare(
    root: Path,
    *,
    config: Path,
    resume: bool = False,
    overwrite: bool = False,
    num_workers: int = 0,
    workers_sharing: int = 0,
    deterministic: bool = False,
) -> RunState:
    """Make `root` ready for a run and return its state, which is the old one's under `resume`.

    A finished run, or one that ended before its first step, is moved aside. An unfinished one is never touched
    unless the caller says how.

    Raises:
        RunDirError: the directory is in use, is no run directory, or holds an unfinished run.
    """
    run = RunDir(root)
    if run.root.exists():
        _refuse_foreign(run)
        with _not_in_use(run):
            fate = _fate(run, resume=resume, overwrite=overwrite)
            if fate is Fate.RESUMED:
                # What the last server did is over; else `status` would call the run dead until the next one begins.
                activity_file(run.root, SERVER).unlink(missing_ok=True)
                return run.update_state(
                    state=RUNNING,
                    config=str(config.absolute()),
                    num_workers=num_workers,
                    workers_sharing=workers_sharing,
                    deterministic=deterministic,
                )
            if fate is Fate.MOVED_ASIDE:
                run.root.rename(_place_aside(run))
            elif fate is Fate.OVERWRITTEN:
                _delete_run(run)
    else:
        _fate(run, resume=resume, overwrite=overwrite)
    run.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    run.root.chmod(0o700)
    state = RunState(
        run_id=uuid4().hex[:12],
        state=RUNNING,
        config=str(config.absolute()),
        started=time.strftime("%Y-%m-%d %H:%M:%S"),
        num_workers=num_workers,
        workers_sharing=workers_sharing,
        deterministic=deterministic,
    )
    run.write_state(state)
    return state


class Fate(Enum):
    """What a start does with the run directory that it finds."""

    NEW = auto()
    RESUMED = auto()
    MOVED_ASIDE = auto()
    OVERWRITTEN = auto()


def preview(root: Path, *, resume: bool = False, overwrite: bool = False) -> tuple[Fate, Path]:
    """What `prepare` would do with the directory, and where what is in it would be then. Changes nothing.

    Raises:
        RunDirError: where `prepare` would, with the same text.
    """
    run = RunDir(root)
    if run.root.exists():
        _refuse_foreign(run)
        if KernelLock(run.lock).is_held():
            raise RunDirError(in_use(run))
    fate = _fate(run, resume=resume, overwrite=overwrite)
    return fate, _place_aside(run) if fate is Fate.MOVED_ASIDE else run.root


def _fate(run: RunDir, *, resume: bool, overwrite: bool) -> Fate:
    if resume and not run.root.exists():
        raise RunDirError(f"Nothing to resume: {run.root} does not exist. Start without --resume.")
    old = run.read_state()
    if resume:
        if old is None:
            raise RunDirError(f"Nothing to resume: {run.root} holds no run. Start without --resume.")
        return Fate.RESUMED
    if old is None:
        return Fate.NEW
    if old.state == FINISHED or (old.state != RUNNING and old.step == 0):
        return Fate.MOVED_ASIDE
    if overwrite:
        return Fate.OVERWRITTEN
    raise RunDirError(_unfinished(run, old))


class _not_in_use:
    """Hold the server's lock while the directory is changed; names the holder when that fails."""

    def __init__(self, run: RunDir) -> None:
        self._lock = KernelLock(run.lock)
        self._run = run

    def __enter__(self) -> None:
        if not self._lock.try_acquire({"role": "preparing a run"}):
            raise RunDirError(in_use(self._run))

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def in_use(run: RunDir) -> str:
    """A sentence that names who holds the run directory."""
    holder = KernelLock(run.lock).holder() or {}
    who = ", ".join(f"{key} {holder[key]}" for key in ("pid", "host", "since") if key in holder)
    return (
        f"{run.root} is in use by a live parameter server ({who or 'holder unknown'}). "
        "Wait for it, stop it, or choose another --run-dir."
    )


def _refuse_foreign(run: RunDir) -> None:
    if not run.root.is_dir() or run.root.is_symlink():
        raise RunDirError(f"{run.root} is not a plain directory. Choose another --run-dir.")
    if run.state_file.exists():
        return
    strangers = [p.name for p in run.root.iterdir() if p.name not in _ENTRIES and not p.name.startswith("log_")]
    if strangers:
        raise RunDirError(
            f"{run.root} is no run directory: it holds {sorted(strangers)[0]!r} and no run.json. "
            "Choose another --run-dir; nothing was changed."
        )


def _unfinished(run: RunDir, old: RunState) -> str:
    return (
        f"{run.root} holds an unfinished run ({old.run_id}, {old.state}, step {old.step}, started {old.started}).\n"
        "Three ways out:\n"
        "  --resume          go on with it\n"
        "  --run-dir OTHER   leave it alone and run elsewhere\n"
        "  --overwrite       delete its queue, logs and metrics (checkpoints stay) and start anew"
    )


def _place_aside(run: RunDir) -> Path:
    """A free name beside the run directory, with the time of its last state."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.localtime(run.state_file.stat().st_mtime))
    target = run.root.with_name(f"{run.root.name}-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = run.root.with_name(f"{run.root.name}-{stamp}-{number}")
    return target


def _delete_run(run: RunDir) -> None:
    logs = [path.name for path in run.root.glob("log_*.txt")]
    for name in (*_ENTRIES, *logs):
        path = run.root / name
        if name == "server.lock":  # held by us, and by nobody else; unlinking it would let two servers in
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
