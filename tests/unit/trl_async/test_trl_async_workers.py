"""The workers of a training under TRL's trainer: what is said when they cannot serve it, and whose directory it is."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from async_grpo.errors import RunDirError, RunFailedError
from async_grpo.launch.launcher import LaunchOptions
from async_grpo.launch.supervisor import Child, Restart
from async_grpo.rundir import paths as runs
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import TrainingSettings, WorkerSettings
from async_grpo.setup.generated.sent_function import VARIABLE
from async_grpo.trl_async.run import QueueRun, WorkerProcesses

DEADLINE_S = 60.0


def child(number: int, program: str, folder: Path) -> Child:
    return Child(
        name=f"worker {number}",
        command=[sys.executable, "-c", program],
        env={},
        log=folder / f"log_{number}.txt",
        grace_s=0.1,
        restart=Restart(unless_first_exit=2),
    )


def error_of(workers: WorkerProcesses) -> RunFailedError:
    """What `check` raises, sooner or later."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            workers.check()
        except RunFailedError as error:
            return error
        time.sleep(0.02)
    raise AssertionError("nothing was raised")


def test_a_worker_that_rejects_its_setup_ends_the_training_with_its_words(tmp_path: Path) -> None:
    refuses = "import sys; print('error: there is no model', file=sys.stderr); sys.exit(2)"
    workers = WorkerProcesses([child(1, refuses, tmp_path), child(2, "import time; time.sleep(600)", tmp_path)])
    try:
        assert "worker 1 rejected its setup" in (said := str(error_of(workers)))
        assert said.endswith("error: there is no model") and str(tmp_path / "log_1.txt") in said
    finally:
        workers.end()


def test_workers_that_cannot_be_started_are_an_error_of_the_training(tmp_path: Path) -> None:
    workers = WorkerProcesses([child(1, "pass", tmp_path / "no folder")])
    assert "could not be started" in str(error_of(workers))
    workers.end()


def queue_run(root: Path, *devices: str, payload: bytes | None = None) -> QueueRun:
    options = LaunchOptions(
        config=root.with_suffix(".py"),
        run_dir=root,
        master_device="cpu",
        worker_devices=devices,
        training=TrainingSettings(),
        work=WorkerSettings(generator="hf"),
    )
    return QueueRun(options, {"temperature": "0.5"}, payload)


def test_a_run_that_was_killed_is_moved_aside_and_one_of_another_kind_is_not(tmp_path: Path) -> None:
    root = tmp_path / "worker"
    killed = queue_run(root)
    killed.begin()
    killed.lock.release()
    again = queue_run(root)
    again.begin()
    state = RunDir(root).read_state()
    assert state is not None and state.run_id == again.run_id != killed.run_id
    assert state.config_values == {"temperature": "0.5"}
    (aside,) = tmp_path.glob("worker-*")
    assert RunDir(aside).state_of(killed.run_id).state == runs.FAILED
    with pytest.raises(RunDirError, match="in use by a live"):
        queue_run(root).begin()
    again.end(runs.FINISHED, {"steps": 3})
    assert RunDir(root).has_ended()
    prepare(tmp_path / "other", config=root.with_suffix(".py"))
    with pytest.raises(RunDirError, match="unfinished"):
        queue_run(tmp_path / "other").begin()


def test_a_function_that_is_in_no_file_reaches_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = f"import os; print(open(os.environ[{VARIABLE!r}]).read(), flush=True); import time; time.sleep(600)"
    monkeypatch.setattr("async_grpo.trl_async.run.worker_child", lambda *given: child(1, reads, tmp_path))
    sent = queue_run(tmp_path / "worker", "cpu", payload=b"the function")
    sent.begin()
    try:
        log, deadline = tmp_path / "log_1.txt", time.monotonic() + DEADLINE_S
        while not (log.exists() and "\n" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert log.read_text() == "the function\n"
    finally:
        sent.end(runs.FINISHED, {})


def test_the_command_starts_a_worker_of_the_same_kind(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    assert queue_run(path).command() == f"async-grpo worker --run-dir {path} --device cpu --generator hf"
