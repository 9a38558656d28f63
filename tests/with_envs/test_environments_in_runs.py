"""Environments of others by `async-grpo train`, with two workers of which one is killed; their tools are called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="it is not installed here: `make test-envs` makes an environment that has it")
pytest.importorskip("openenv.core", reason="openenv-core is not installed here: `make test-envs` has it")

import echo_by_heart
import sums_by_heart
from openenv_servers import calls, from_template, served
from sums_taskset import CALL

from kit.learnt_by_heart import write_learnt
from kit.runs import command, ran, steps_logged
from kit.tiny_trainer import chat_rows

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
STEPS = 6


def test_an_environment_of_verifiers(tmp_path: Path) -> None:
    trainer: Any = sums_by_heart.get_trainer()
    row = trainer.train_dataset[0]
    write_learnt(trainer, [CALL % (0, 0), "0"], row, group_size=2, path=tmp_path / "learnt.safetensors")
    shown = trained_with_two_workers(tmp_path, "sums_by_heart.py")
    assert "calculator_add" in shown
    assert "verifiers/metrics/additions" in (tmp_path / "worker" / "metrics.jsonl").read_text()


def test_an_environment_of_openenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_template(tmp_path)
    with served("echo_env.server.app:app", tmp_path) as (url, _):
        monkeypatch.setenv("OPENENV_URL", url)
        says = [calls("step", '{"message": "hello"}'), "done"]
        learnt = tmp_path / "learnt.safetensors"
        write_learnt(echo_by_heart.get_trainer(), says, chat_rows(1)[0], group_size=2, path=learnt)
        shown = trained_with_two_workers(tmp_path, "echo_by_heart.py")
    assert '"echoed_message": "hello"' in shown


def trained_with_two_workers(folder: Path, setup: str) -> str:
    """Train, kill a worker meanwhile, and have the run's commands read it; returns what `rollouts` shows."""
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(paths), "LEARNT": str(folder / "learnt.safetensors")}
    with command("train", str(HERE / setup), "-n", "2", cwd=folder, **env) as run:
        run.wait_until(lambda: steps_logged(folder / "worker"), "a step")
        run.wait_until(lambda: run.worker(1), "worker 1").kill()
        assert run.wait() == 0, run.output
    assert steps_logged(folder / "worker") == list(range(1, STEPS + 1))
    shown = ""
    for name in ("audit", "status", "rollouts"):
        shown = ran(name, "worker", cwd=folder, **env)
    return shown
