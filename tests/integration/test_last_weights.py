"""A run from Python leaves its last weights, whatever its file saves, and outlives the session that began it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo import AsyncGRPO
from async_grpo.api.result import Result
from async_grpo.rundir.paths import FINISHED, KEEP_LAST_WEIGHTS, RunDir
from async_grpo.training.last_weights import keep_last_weights
from async_grpo.training.trl_trainer import fit
from kit.compared_with_trl import equal_weights
from kit.in_process import InProcessRun
from kit.runs import DEADLINE_S, ROOT, SETUP, Command
from kit.several_ranks import EXAMPLES
from kit.tiny_trainer import build_trainer


def trained(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """A trainer after two steps, whose run was started from Python."""
    monkeypatch.setenv(KEEP_LAST_WEIGHTS, "1")
    run_dir.mkdir(exist_ok=True)
    run = InProcessRun(lambda: build_trainer(run_dir.parent / "outputs", max_steps=2, **settings))
    keep_last_weights(run.trainer, RunDir(run_dir))
    fit(run.trainer, resume_from=None)
    return run.trainer


def test_the_weights_of_a_training_that_saves_none_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(tmp_path / "worker", monkeypatch)
    assert equal_weights(Result(tmp_path / "worker").model(), trainer.model)
    kept = {path.name for path in (tmp_path / "worker" / "last_weights").iterdir()}
    assert "model.safetensors" in kept and not kept & {"optimizer.pt", "rollout_state.json"}
    assert [path.name for path in (tmp_path / "worker").iterdir()] == ["last_weights"]


def test_a_training_with_a_last_checkpoint_keeps_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = RunDir(tmp_path / "worker").last_weights  # of the same run, which is resumed
    earlier.mkdir(parents=True)
    trained(tmp_path / "worker", monkeypatch, save_strategy="steps", save_steps=2)
    assert not earlier.exists()


def test_a_run_of_a_command_keeps_what_its_setup_file_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEEP_LAST_WEIGHTS, raising=False)
    trainer = build_trainer(tmp_path)
    callbacks = list(trainer.callback_handler.callbacks)
    keep_last_weights(trainer, RunDir(tmp_path / "worker"))
    assert trainer.callback_handler.callbacks == callbacks


@pytest.mark.parametrize("config", ["none", pytest.param(str(EXAMPLES / "fsdp2.yaml"), marks=pytest.mark.slow)])
def test_train_then_model(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sharded = config != "none"
    setup = SETUP.with_name("sharded_model.py") if sharded else SETUP
    options = {"accelerate_config": config, "set": {} if sharded else {"save_strategy": "no"}}
    run = AsyncGRPO(setup, workers=1, run_dir=tmp_path / "worker", steps=1, eval_every=0, quiet=True, **options)
    model = run.train().model()
    assert sum(parameter.numel() for parameter in model.parameters()) > 1000
    checkpoints = list((tmp_path / "checkpoints").glob("checkpoint-*"))
    assert len(checkpoints) == sharded, "one whose weights are in pieces, which transformers cannot load"


SESSION = """
import sys, time
from async_grpo import AsyncGRPO
exec(compile(open(sys.argv[1]).read(), "<cell>", "exec"))
STEPS = {"steps": 300}
made_by_the_file = get_trainer
def of_the_cell():
    return made_by_the_file()
handle = AsyncGRPO(of_the_cell, workers=1, run_dir="worker", eval_every=0, **STEPS).start()
print("begun", flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_run_of_a_session_outlives_it_and_its_worker(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SESSION, str(SETUP)]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as session:
        assert session.stdout is not None
        assert any(line == b"begun\n" for line in session.stdout)
        session.kill()  # the kernel is restarted
    handle = AsyncGRPO.attach(tmp_path / "worker")
    try:
        handle.wait(step=2, timeout_s=DEADLINE_S)
        killed = worker_of(handle.status())
        psutil.Process(killed).kill()
        handle.wait(step=handle.status().step + 20, timeout_s=DEADLINE_S)
        assert worker_of(handle.status()) not in (None, killed), "another one has got the function"
    finally:
        result = handle.stop()
    assert result.summary["state"] in ("stopped", FINISHED)
    again = Command(["train", "--resume"], tmp_path)
    assert again.wait() == 2
    assert "AsyncGRPO(of_the_cell, resume=True, run_dir=…).train()" in again.output


def worker_of(view: Any) -> int | None:
    """The pid of the live worker."""
    return next((worker.pid for worker in view.workers if worker.alive), None)
