"""A run from Python leaves its last weights, whether or not the setup file saves checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.api import AsyncGRPO
from async_grpo.api.result import Result
from async_grpo.rundir.paths import KEEP_LAST_WEIGHTS, RunDir
from async_grpo.training.last_weights import keep_last_weights
from async_grpo.training.trl_trainer import fit
from kit.compared_with_trl import equal_weights
from kit.in_process import InProcessRun
from kit.runs import SETUP
from kit.several_ranks import EXAMPLES
from kit.tiny_trainer import build_trainer

pytestmark = pytest.mark.integration


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


@pytest.mark.parametrize(
    "accelerate_config", ["none", pytest.param(str(EXAMPLES / "fsdp2.yaml"), marks=pytest.mark.slow)]
)
def test_train_then_model(accelerate_config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sharded = accelerate_config != "none"
    setup = SETUP.with_name("sharded_model.py") if sharded else SETUP
    options = {"accelerate_config": accelerate_config, "set": {} if sharded else {"save_strategy": "no"}}
    run = AsyncGRPO(setup, workers=1, run_dir=tmp_path / "worker", steps=1, eval_every=0, quiet=True, **options)
    model = run.train().model()
    assert sum(parameter.numel() for parameter in model.parameters()) > 1000
    checkpoints = list((tmp_path / "checkpoints").glob("checkpoint-*"))
    assert len(checkpoints) == sharded, "one whose weights are in pieces, which transformers cannot load"
