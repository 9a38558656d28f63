"""What W&B and trackio are told of a run; tests/with_trackers reads what their real clients make of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.settings import TrainingSettings
from async_grpo.telemetry.trackers import name_for_wandb, name_run

NAMED = TrainingSettings(run_name="warm", run_group="seeds", run_tags=("a", "b"))


def trainer(*report_to: str) -> Any:
    return SimpleNamespace(args=SimpleNamespace(run_name="of the file", report_to=list(report_to)))


def test_options_override_the_setup_file_and_the_environment_and_nothing_else_does() -> None:
    environ = {"WANDB_TAGS": "old", "WANDB_PROJECT": "mine"}
    name_for_wandb(TrainingSettings(), environ)
    assert environ == {"WANDB_TAGS": "old", "WANDB_PROJECT": "mine"}
    name_for_wandb(NAMED, environ)
    assert environ == {"WANDB_TAGS": "a,b", "WANDB_PROJECT": "mine", "WANDB_NAME": "warm", "WANDB_RUN_GROUP": "seeds"}
    named = trainer("wandb")
    name_run(named, TrainingSettings())
    assert named.args.run_name == "of the file"
    name_run(named, NAMED)
    assert named.args.run_name == "warm"


def test_trackio_is_told_what_transformers_does_not_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[dict[str, Any]]()
    trackio = SimpleNamespace(init=lambda **how: begun.append(how))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    name_run(trainer("trackio"), NAMED)
    trackio.init(project="p", name="warm")
    assert begun == [{"project": "p", "name": "warm", "group": "seeds", "config": {"tags": ["a", "b"]}}]


def test_a_group_that_nobody_is_told_is_said(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    name_run(trainer("tensorboard"), NAMED)
    assert "report_to of the GRPOConfig names neither" in warnings[0]
