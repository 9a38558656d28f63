"""A run that is resumed with something else than it was begun with: refused, or said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from datasets import Dataset

from async_grpo.archive import checkpoint_folders
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import RunDirError
from async_grpo.roles.parameter_server import training_of
from async_grpo.rundir.files import write_json
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.setup.process import StopRequest
from async_grpo.training.checkpoints import CheckpointFolder, resume
from async_grpo.training.hyperparameters import configuration
from kit.plans import planned
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer, plain_rows

pytestmark = pytest.mark.integration


@pytest.fixture
def begun(tmp_path: Path) -> RunState:
    """A run in `worker` that has a checkpoint in `outputs`."""
    run = RunDir(tmp_path / "worker")
    state = prepare(run.root, planned(Path("my_trainer.py")))
    folder = CheckpointFolder(build_trainer(tmp_path / "outputs"), run, state)
    checkpoint_folders.start_saving(folder.staging)
    written = folder.staging / "checkpoint-4"
    written.mkdir()
    used = RolloutState(run_id=state.run_id, step=4, next_seq=16, rounds=4, unusable=[], consumed_below=16, consumed=[])
    folder.put(written, used, batch=None)
    return run.update_state(**folder.record)


def test_the_same_is_resumed(tmp_path: Path, begun: RunState, warnings: list[str]) -> None:
    found = resume(build_trainer(tmp_path / "outputs"), RunDir(tmp_path / "worker"), begun)
    assert found is not None and found.path == tmp_path / "outputs" / "checkpoint-4"
    assert warnings == []
    assert (begun.step, begun.output_dir) == (4, str(tmp_path / "outputs"))


def test_another_model_is_refused_in_one_sentence(tmp_path: Path, begun: RunState) -> None:
    larger = build_trainer(tmp_path / "outputs", model=build_model(build_tokenizer(), num_hidden_layers=3))
    with pytest.raises(RunDirError, match=r"checkpoint-4 is of another model than the setup file builds now: \d+ tens"):
        resume(larger, RunDir(tmp_path / "worker"), begun)
    earlier = replace(begun, model="", data="")  # a run of an earlier version did not note it
    assert resume(larger, RunDir(tmp_path / "worker"), earlier) is not None


def test_data_in_another_order_are_said(tmp_path: Path, begun: RunState, warnings: list[str]) -> None:
    turned = Dataset.from_list(plain_rows().to_list()[::-1])
    trainer = build_trainer(tmp_path / "outputs", train_dataset=turned)
    assert resume(trainer, RunDir(tmp_path / "worker"), begun) is not None
    assert len(warnings) == 1 and "not what they were, or not in the same order: 14 rows" in warnings[0]


@pytest.mark.parametrize("stops", [False, True])
def test_what_is_undecided_may_stop_a_resumed_run(stops: bool, tmp_path: Path, begun: RunState) -> None:
    run, trainer = RunDir(tmp_path / "worker"), build_trainer(tmp_path / "outputs")
    write_json(run.summary, {"undecided_tokens": 64} if stops else {})
    with training_of(trainer, run, begun, TrainingSettings(resume=True), StopRequest()) as training:
        guard = cast(Any, trainer).correct.fresh
        assert guard.bound.stops == stops
        guard.on_pre_optimizer_step(None, trainer.state)
        assert training.figures == {"undecided_tokens": 0, "undecided_nats": 0.0}


def test_a_setting_that_the_checkpoint_cannot_give_up_is_refused_by_the_record_of_the_run(
    tmp_path: Path, begun: RunState
) -> None:
    run, trainer = RunDir(tmp_path / "worker"), build_trainer(tmp_path / "outputs")
    write_json(run.hyperparameters, {"trainer": configuration(trainer)})
    assert resume(trainer, run, begun) is not None
    write_json(run.hyperparameters, {"trainer": {**configuration(trainer), "optim": "sgd"}})
    with pytest.raises(RunDirError, match=r"^optim is \w+, and was sgd: "):
        resume(trainer, run, begun)
