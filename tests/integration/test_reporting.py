"""Where metrics go: what `report_to` names, TensorBoard where it names none, and always `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from async_grpo.telemetry.run_log import RunLog
from async_grpo.training.reporting import CurvesCallback, report
from kit.in_process import InProcessRun
from kit.runs import lines_of
from kit.tiny_trainer import build_trainer

pytestmark = pytest.mark.integration


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
