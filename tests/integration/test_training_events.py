"""When TRL's trainer calls what happens around its optimizer steps, and where metrics go."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils

from async_grpo.archive import checkpoint_folders
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.telemetry.run_log import RunLog
from async_grpo.training.reporting import CurvesCallback, report
from async_grpo.training.rollout_source import StopTraining
from async_grpo.training.trl_trainer import fit
from kit.in_process import InProcessRun
from kit.runs import lines_of
from kit.tiny_trainer import build_trainer, plain_rows

pytestmark = pytest.mark.integration


class NotedRun(InProcessRun):
    """Writes down what it is called for; asked for batch number `stop_at` it stops the training."""

    def __init__(self, *args: Any, stop_at: int = 1000, **options: Any) -> None:
        self.noted: list[str] = []
        self._stop_at = stop_at
        super().__init__(*args, **options)

    def training_begins(self) -> None:
        self.noted.append("begins")

    def take_groups(self, version: int) -> Any:
        if len(self.batches) == self._stop_at:
            raise StopTraining
        self.noted.append(f"take {version}")
        return super().take_groups(version)

    def step_done(self) -> bool:
        self.noted.append(f"step {self.trainer.state.global_step}")
        return self.trainer.state.global_step < 3

    def ends_early(self) -> None:
        self.noted.append("ends early")

    def before_checkpoint(self) -> Path | None:
        self.noted.append("space")

    def checkpoint_written(self, checkpoint: Path) -> None:
        assert (checkpoint / "trainer_state.json").exists()
        self.noted.append(checkpoint.name)


class EvaluatedRun(InProcessRun):
    """Logs an evaluation at the end of each step."""

    def step_done(self) -> bool:
        Trainer.log(self.trainer, {"eval_reward": 0.5})
        return True


def test_a_step_is_logged_at_whose_end_an_evaluation_is_logged(tmp_path: Path) -> None:
    run = EvaluatedRun(lambda: build_trainer(tmp_path, max_steps=3))
    fit(run.trainer, resume_from=None)
    assert [entry["step"] for entry in run.trainer.state.log_history if "loss" in entry] == [1, 2, 3]


def test_the_order_of_events_and_a_step_that_asks_to_end_after_a_checkpoint(tmp_path: Path) -> None:
    run = NotedRun(lambda: build_trainer(tmp_path, max_steps=5, save_strategy="steps", save_steps=2))
    fit(run.trainer, resume_from=None)
    first, second = ["take 0", "step 1"], ["take 1", "step 2", "space", "checkpoint-2"]
    assert run.noted == ["begins", *first, *second, "take 2", "step 3", "space", "checkpoint-3"]


class PublishedWeights(InProcessRun):
    """Keeps a weight when a version would be published, and when the next batch is trained on."""

    def __init__(self, *args: Any) -> None:
        self.published: list[float] = []
        self.trained: list[float] = []
        super().__init__(*args)

    def _weight(self) -> float:
        return float(next(self.trainer.model.parameters()).detach().flatten()[0])

    def training_begins(self) -> None:
        self.published.append(self._weight())

    def take_groups(self, version: int) -> Any:
        self.trained.append(self._weight())
        return super().take_groups(version)

    def step_done(self) -> bool:
        self.published.append(self._weight())
        return True


class Shrinks(TrainerCallback):
    """Changes the weights itself, as a moving average or a bound of their norm does."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    on_step_end = on_train_begin


def test_weights_that_a_callback_changes_are_published_as_they_are_trained(tmp_path: Path) -> None:
    run = PublishedWeights(lambda: build_trainer(tmp_path, arguments={"callbacks": [Shrinks()]})).train()
    assert run.published[:2] == run.trained
    assert run.published[2] == run._weight()


def test_a_stop_in_the_middle_of_a_step_saves_the_batch_that_the_last_step_left_unfinished(tmp_path: Path) -> None:
    """Two passes on each batch, three to a step: step 1 ends in the middle of batch 1, step 2 begins with its rest."""
    shape = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 3}
    run = NotedRun(lambda: build_trainer(tmp_path, max_steps=5, **shape), stop_at=2)
    fit(run.trainer, resume_from=None)
    assert run.noted == ["begins", "take 0", "take 0", "step 1", "ends early", "space", "checkpoint-1"]
    unfinished = run.trainer.batch_after_step
    assert unfinished.passes_done == 1
    advantages = [inputs["advantages"] for inputs in unfinished.inputs]
    assert sorted(torch.cat(advantages).tolist()) == sorted(run.inputs[1]["advantages"].tolist())


def test_a_checkpoint_at_the_last_step_is_not_trained_on(tmp_path: Path) -> None:
    """transformers itself would take one step more."""
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    assert fit(NotedRun(lambda: build_trainer(tmp_path, **steps)).trainer, resume_from=None)
    for last in (2, 1):
        again = NotedRun(lambda last=last: build_trainer(tmp_path, **{**steps, "max_steps": last}))
        assert not fit(again.trainer, resume_from=tmp_path / "checkpoint-2")
        assert again.noted == [] and again.trainer.state.global_step == 2


class StagedRun(NotedRun):
    """Its checkpoints are written into another folder first."""

    def before_checkpoint(self) -> Path:
        return Path(self.trainer.args.output_dir) / "saving"

    def checkpoint_written(self, checkpoint: Path) -> None:
        super().checkpoint_written(checkpoint)
        assert checkpoint.parent.name == "saving"
        checkpoint.rename(checkpoint.parents[1] / checkpoint.name)


def test_a_checkpoint_that_is_written_aside_names_its_place_as_the_best_one(tmp_path: Path) -> None:
    settings = {"max_steps": 2, "save_strategy": "best", "save_total_limit": 1, "per_device_eval_batch_size": 8}
    judged = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward", "greater_is_better": True}
    rows = {"eval_dataset": plain_rows(4)}
    run = StagedRun(lambda: build_trainer(tmp_path, arguments=rows, **judged, **settings))
    (tmp_path / "checkpoint-30-backup").mkdir()
    fit(run.trainer, resume_from=None)
    best = Path(run.trainer.state.best_model_checkpoint)
    assert best == tmp_path / best.name and best.is_dir()
    state = json.loads((best / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)
    assert (tmp_path / "checkpoint-30-backup").is_dir(), "transformers' own clearing up at the end deletes it"
    assert run.trainer.args.save_total_limit == 1


def test_the_best_checkpoint_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative output_dir: the state names a path that only the folder of the first start has."""
    steps = {"save_strategy": "steps", "save_steps": 1}
    fit(NotedRun(lambda: build_trainer(tmp_path, max_steps=2, **steps)).trainer, resume_from=None)
    for step in (1, 2):
        it = RolloutState(run_id="m", step=step, next_seq=9, rounds=step, unusable=[], consumed_below=step, consumed=[])
        state = json.loads((saved := tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        named = {"best_global_step": 1, "best_model_checkpoint": "relative/checkpoint-1"}
        saved.write_text(json.dumps(state | named))
        checkpoint_folders.save(tmp_path / f"checkpoint-{step}", it)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    again = StagedRun(lambda: build_trainer(tmp_path, max_steps=3, **steps))
    fit(again.trainer, resume_from=tmp_path / "checkpoint-2")
    assert again.trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_the_hub_gets_a_checkpoint_from_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload goes on in a thread: the folder that a checkpoint is written into is gone before it ends."""
    run = StagedRun(lambda: build_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1))
    run.trainer.args.push_to_hub = True
    pushed: list[Path] = []
    monkeypatch.setattr(type(run.trainer), "_push_from_checkpoint", lambda self, folder: pushed.append(Path(folder)))
    monkeypatch.setattr(type(run.trainer), "_finish_current_push", lambda self: None)
    fit(run.trainer, resume_from=None)
    assert pushed == [tmp_path / "checkpoint-1"] and (pushed[0] / "model.safetensors").exists()
    assert run.trainer.args.push_to_hub


def test_the_hub_leaves_out_what_begins_with_an_underscore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it gets nothing of ours: the names of our files in an output_dir begin like that."""
    patterns: list[list[str]] = []
    hub = SimpleNamespace(upload_folder=lambda **options: patterns.append(options["ignore_patterns"]))
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    trainer = build_trainer(tmp_path)
    trainer.hub_model_id, trainer.push_in_progress = "me/model", SimpleNamespace(is_done=lambda: True, jobs=[])
    trainer.push_to_hub()
    assert patterns == [["_*", "checkpoint-*"]]


# --- Metrics: to what `report_to` names, to TensorBoard where it names none, and always to metrics.jsonl ---------


class Tracker(TrainerCallback):
    """A reporter as transformers has them for wandb and trackio: made without arguments, told by `on_log`."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.told.append({"step": state.global_step, **(logs or {})})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InProcessRun:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tracker", Tracker)
    return InProcessRun(lambda: build_trainer(tmp_path / "outputs", report_to=["tracker"]))


def callback(run: InProcessRun, kind: type[Any]) -> list[Any]:
    return [it for it in run.trainer.callback_handler.callbacks if isinstance(it, kind)]


def test_what_report_to_names_is_told_everything(run: InProcessRun, tmp_path: Path) -> None:
    log = RunLog(tmp_path / "metrics.jsonl")
    curves = report(run.trainer, log, tmp_path / "tensorboard")
    run.train()
    log.close()
    assert curves() == tmp_path / "tensorboard"
    (tracker,) = callback(run, Tracker)
    steps = [entry for entry in tracker.told if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    ours = {"async/staleness_mean", "async/rollouts_per_second", "async/trainer_wait_fraction"}
    assert ours | {"reward", "rewards/letters/mean", "completions/mean_length", "grad_norm"} <= steps[0].keys()
    written = lines_of(tmp_path / "metrics.jsonl")
    assert [set(entry) - {"monotonic_s"} for entry in written] == [set(entry) for entry in tracker.told]
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))  # nobody named another one


def test_a_tensorboard_of_the_users_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    run = InProcessRun(lambda: build_trainer(tmp_path / "outputs", report_to=["tensorboard"]))
    log = RunLog(tmp_path / "metrics.jsonl")
    curves = report(run.trainer, log, tmp_path / "tensorboard")
    run.train()
    log.close()
    assert callback(run, CurvesCallback) == []
    assert curves() == tmp_path / "mine"
    assert not (tmp_path / "tensorboard").exists()
    assert list((tmp_path / "mine").rglob("events.out.tfevents.*"))
