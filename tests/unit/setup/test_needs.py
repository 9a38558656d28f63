"""What reward functions need is asked before a run: MBPP's programs may not run, or cannot be isolated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.checks.plan import trainer_facts
from async_grpo.rewards import gsm8k, mbpp
from async_grpo.rewards.sandbox import SWITCH, SandboxError
from async_grpo.settings import TrainingSettings
from async_grpo.setup.generator_choice import HF
from async_grpo.setup.needs import check_needs
from async_grpo.training import before_start

TRAINER: Any = SimpleNamespace(reward_funcs=[gsm8k, mbpp], eval_dataset=None)
NOT_ALLOWED = f"set {SWITCH}=1"


@pytest.fixture(autouse=True)
def not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)


def test_a_reward_that_runs_programs_is_refused_where_none_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match=NOT_ALLOWED):
        check_needs(TRAINER)
    check_needs(SimpleNamespace(reward_funcs=[gsm8k, "a reward model"]))
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr("async_grpo.rewards.programs.run_code", lambda source: None)
    check_needs(TRAINER)


def test_the_plan_of_plain_trl_and_of_a_distributed_run_and_its_start_refuse_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SandboxError):
        trainer_facts._check_alone(TRAINER, SimpleNamespace(eval_every=0, serves=False))  # type: ignore[arg-type]
    for name in ("refuse_publish_dtype", "sharding_of", "check_agent"):
        monkeypatch.setattr(before_start, name, lambda *_, **__: None)
    monkeypatch.setattr(before_start, "groups_per_round", lambda trainer: 1)
    monkeypatch.setattr(before_start.trl_trainer, "refuse_unsupported", lambda trainer: None)
    with pytest.raises(SandboxError):
        before_start.refuse(TRAINER, TrainingSettings(), HF)
