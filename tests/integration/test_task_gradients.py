"""`mtl="pcgrad"`: the shares of the tasks sum to TRL's gradient, and the run is that of plain TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_grpo.tasks import gradients
from kit.compared_with_trl import run_as_trl_would
from kit.in_process import InProcessRun
from kit.rows_of_tasks import TASKS, multi_task_trainer
from kit.tiny_trainer import GROUP_SIZE

pytestmark = pytest.mark.integration

IN_PARTS = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3 * GROUP_SIZE}


def trained(tmp_path: Path, mtl: str, **changes: Any) -> InProcessRun:
    settled = {"per_device_train_batch_size": 5 * GROUP_SIZE, "max_steps": 3, "scale_rewards": "none", **changes}
    return InProcessRun(multi_task_trainer(tmp_path, {"mtl": mtl}, **settled), padding="trl").train()


def farthest(ours: InProcessRun, theirs: InProcessRun) -> float:
    weights = theirs.trainer.model.state_dict()
    return max(float((it - weights[name]).abs().max()) for name, it in ours.trainer.model.state_dict().items())


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "num_iterations": 2, "max_steps": 4},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "dapo", "num_iterations": 2, "max_steps": 4, **IN_PARTS},
        {"loss_type": "grpo", "max_grad_norm": 0.1, **IN_PARTS},
    ],
    ids=str,
)
def test_shares_that_keep_their_weight_give_the_weights_of_equal(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "task_weights", lambda method, dots, seed: torch.ones(len(dots), dtype=dots.dtype))
    ours, theirs = trained(tmp_path, "pcgrad", **changes), trained(tmp_path, "equal", **changes)
    assert farthest(ours, theirs) < 1e-6
    assert farthest(ours, InProcessRun(multi_task_trainer(tmp_path, max_steps=1))) > 1e-4, "something was learnt"
    assert [one["loss"] for one in ours.logs] == pytest.approx([one["loss"] for one in theirs.logs], abs=1e-6)


def test_a_run_is_what_plain_trl_does_and_says_where_tasks_conflict(tmp_path: Path) -> None:
    run, _ = run_as_trl_would(
        multi_task_trainer(tmp_path, {"mtl": "pcgrad"}, per_device_train_batch_size=6 * GROUP_SIZE)
    )
    for entry in run.logs:
        assert entry["loss"] == pytest.approx(sum(entry[f"actor/{task}_loss"] for task in TASKS), abs=1e-5)
        assert 0 <= entry["mtl/conflicts"] <= 1 and -1 <= entry["mtl/cosine_min"] <= 1
        assert (entry["mtl/conflicts"] > 0) == (entry["mtl/cosine_min"] < 0)
    assert max(entry["mtl/conflicts"] for entry in run.logs) > 0
    assert run.trainer.gradients_besides == len(TASKS)


def test_conflicting_tasks_are_trained_otherwise_than_with_equal(tmp_path: Path) -> None:
    ours, theirs = trained(tmp_path, "pcgrad"), trained(tmp_path, "equal")
    assert farthest(ours, theirs) > 1e-5
