"""What a parameter server writes when it ends, and what it leaves alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import AsyncGRPOError, QueueError, RunDirError
from async_grpo.roles import parameter_server
from async_grpo.roles.parameter_server import ServerOptions, run_parameter_server
from async_grpo.rundir import paths as runs
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir
from kit.plans import planned

Serve = Callable[[Callable[..., Any]], str]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run a server in `tmp_path/worker` that trains as the function given to it does."""
    monkeypatch.setattr(parameter_server, "StopRequest", type("S", (), {"install": lambda self: self}))
    monkeypatch.setattr(parameter_server, "write_stacks_on_signal", lambda path: None)
    options = ServerOptions(run_dir=tmp_path / "worker", plan=planned(tmp_path / "setup.py", steps=30))
    prepare(options.run_dir, options.plan)

    def serve(train: Callable[..., Any]) -> str:
        monkeypatch.setattr(parameter_server, "_train", train)
        return run_parameter_server(options)

    return serve


def test_a_server_that_fails_while_it_loads_says_so_in_its_files(tmp_path: Path, serve: Serve) -> None:
    def fail(*_: object) -> None:
        raise RunDirError("no")

    with pytest.raises(RunDirError):
        serve(fail)
    assert RunDir(tmp_path / "worker").read_state().state == runs.FAILED


def test_a_worker_waits_for_this_servers_weights_and_takes_no_file_of_a_killed_one_for_them(
    tmp_path: Path, serve: Serve
) -> None:
    handle = RunDir(tmp_path / "worker").weights_handle
    handle.write_text("{}")

    def train(*_: object) -> str:
        assert not handle.exists(), "gone before anything is loaded"
        return runs.FINISHED

    assert serve(train) == runs.FINISHED


@pytest.mark.parametrize("reason", [RunDirError("it is of another model"), SystemExit(143)])
def test_a_resume_that_is_refused_or_stopped_while_it_loads_changes_nothing(
    tmp_path: Path, serve: Serve, reason: BaseException
) -> None:
    def refuse(*_: object) -> None:
        assert RunDir(tmp_path / "worker").state_of(None).plan.num_workers == 7, "what the refused run would have"
        raise reason

    run = RunDir(tmp_path / "worker")
    run.update_state(state=runs.FINISHED, step=30)
    run.summary.write_text("of the training")
    before = run.state_file.read_bytes()
    prepare(run.root, planned(Path("other.py"), resume=True, workers=7, steps=50))
    with pytest.raises(type(reason)):
        serve(refuse)
    assert run.state_file.read_bytes() == before
    assert run.summary.read_text() == "of the training"


def test_a_server_whose_directory_another_run_has_now_leaves_that_run_alone(tmp_path: Path, serve: Serve) -> None:
    root = tmp_path / "worker"

    def lose_the_directory(options: object, run: RunDir, state: object, stop: object, lock: KernelLock) -> None:
        (root / "server.lock").unlink()
        lock.release()  # so that this process can be the second server, too
        run.update_state(run_id="another")
        raise QueueError("server.lock was deleted while in use; another process has it now.")

    with pytest.raises(QueueError, match="another process has it now"):
        serve(lose_the_directory)
    state = RunDir(root).read_state()
    assert (state.run_id, state.state) == ("another", runs.RUNNING)
    assert not (root / "summary.json").exists()


def test_a_server_whose_lock_another_server_of_the_same_run_has_writes_nothing(tmp_path: Path, serve: Serve) -> None:
    def lose_the_lock(options: object, run: RunDir, state: object, stop: object, lock: KernelLock) -> None:
        lock.release()
        raise QueueError("lost")

    with pytest.raises(QueueError):
        serve(lose_the_lock)
    assert RunDir(tmp_path / "worker").read_state().state == runs.RUNNING


def test_a_server_whose_directory_is_gone_says_that(tmp_path: Path, serve: Serve) -> None:
    def delete(options: object, run: RunDir, *_: object) -> None:
        shutil.rmtree(run.root)
        (run.root / "queue" / "x").read_bytes()

    with pytest.raises(AsyncGRPOError, match="was renamed or deleted while the run was going on"):
        serve(delete)
