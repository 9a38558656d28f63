"""Something else in the place of each file of a run: what reads or writes it says so at once, or does without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from async_grpo.cli import main
from async_grpo.errors import AsyncGRPOError
from async_grpo.roles.parameter_server import training_of
from async_grpo.rundir import summary
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import SERVER, RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.setup.process import StopRequest, write_stacks_on_signal
from async_grpo.telemetry.activity import LOADING, activity
from kit.plans import planned
from kit.tiny_trainer import build_trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ENTRIES = (
    *("run.json", "server.lock", "metrics.jsonl", "consumed.jsonl", "evaluations.jsonl", "hyperparameters.json"),
    *("summary.json", "ps_ipc_handle.json", "ps_ipc_handle_version.json", "ps_ipc_handle.owner.lock"),
    *("alive/dev1.lock", "alive/dev1.status", "alive/server.status", "alive/server.stacks", "tmp/jobs.pipe"),
    *("queue", "done", "quarantine", "tmp", "alive", "tensorboard"),
)
OBSTACLES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "folder": lambda path: (path / "inside").mkdir(parents=True),
    "sparse": lambda path: (path.touch(mode=0o600), os.truncate(path, 300 << 20)),
    "junk": lambda path: path.write_bytes(b'\0\xff{"a":' * 50),
}


def begin_training(run: RunDir, state: RunState) -> None:
    write_stacks_on_signal(run.stacks(SERVER))
    activity.publish(run.root, SERVER, device="cpu", run_id=state.run_id, state=LOADING, stall_after_s=60)
    trainer = build_trainer(run.root.parent / "outputs")
    with training_of(trainer, run, state, TrainingSettings(), StopRequest()) as training:
        training.training_begins()


@pytest.mark.parametrize("obstacle", ["link", *OBSTACLES])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_obstacle_is_named_or_overcome(tmp_path: Path, entry: str, obstacle: str) -> None:
    (victim := tmp_path / "victim").write_text("mine")
    run = RunDir(tmp_path / "worker")
    state = prepare(run.root, planned(Path("my_trainer.py")))
    for folder in ("alive", "tmp"):
        (run.root / folder).mkdir(mode=0o700, exist_ok=True)
    path = run.root / entry
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if obstacle == "link":
        path.symlink_to(victim)
    else:
        OBSTACLES[obstacle](path)
    steps: list[Callable[[], object]] = [lambda: begin_training(run, state)]
    steps += [lambda name=name: main([name, str(run.root)]) for name in ("audit", "status", "rollouts")]
    steps += [lambda: summary.show(run), lambda: prepare(run.root, planned(Path("my_trainer.py"), resume=True))]
    for step in steps:
        try:
            step()
        except AsyncGRPOError as error:
            assert "\n  File " not in str(error)
    assert victim.read_text() == "mine"
