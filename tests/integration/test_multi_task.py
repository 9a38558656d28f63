"""`MultiTask`: the same in plain TRL and in a run, with any way to combine gradients; and what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from async_grpo.credit import PPOConfig, PPOTrainer, TurnGRPOTrainer
from async_grpo.errors import UsageError
from async_grpo.roles.evaluations import log_evaluation
from async_grpo.setup.overrides import describe_overrides, overridden
from async_grpo.tasks import MultiTask, gradients, score
from async_grpo.telemetry import entries
from async_grpo.telemetry.run_log import RunLog
from async_grpo.training.reporting import LogCallback
from kit.compared_with_trl import run_as_trl_would, settings
from kit.in_process import InProcessRun, training_logs
from kit.tiny_trainer import GROUP_SIZE, letters, plain_rows

NAMES = ("math", "logic", "math", "code", "math", "math", "logic", "math", "code", "math", "math", "math", "math", "x")
TASKS = ("math", "logic", "code")


class MultiTaskTrainer(MultiTask, GRPOTrainer): ...


def rows_of_tasks() -> Dataset:
    """13 rows: 9 of math, 2 of logic, 2 of code; each of a source of its own half of its task."""
    given = [
        {**row, "task": task, "data_source": f"{task}__{at % 2}", "ground_truth": json.dumps(at)}
        for at, (row, task) in enumerate(zip(plain_rows(), NAMES, strict=True))
    ]
    return Dataset.from_list(given[:-1])


def multi_task_trainer(tmp_path: Path, given: dict[str, Any] | None = None, **changes: Any) -> Callable[..., Any]:
    settled = {"trainer_class": MultiTaskTrainer, "train_dataset": rows_of_tasks(), "per_device_train_batch_size": 6}
    return settings(tmp_path, given, **{**settled, "max_steps": 6, **changes})


class TurnTrainer(MultiTask, TurnGRPOTrainer): ...


class CriticTrainer(MultiTask, PPOTrainer): ...


def tasks_of(run: InProcessRun) -> list[Counter[str]]:
    return [Counter(group.job.row["task"] for group in batch) for batch in run.batches]


@pytest.mark.parametrize("trainer_class", [MultiTaskTrainer, TurnTrainer])
def test_a_run_is_what_plain_trl_does_and_each_batch_has_each_task(tmp_path: Path, trainer_class: Any) -> None:
    """Two epochs of 4 batches; all figures are equal, those of the tasks too."""
    run, plain = run_as_trl_would(multi_task_trainer(tmp_path, trainer_class=trainer_class))
    assert tasks_of(run) == [Counter(TASKS)] * 6
    first = training_logs(plain)[0]
    assert {f"{task}/reward" for task in TASKS} <= first.keys()
    expected = {}
    for group in run.batches[0]:
        task, source = group.job.row["task"], group.job.row["data_source"]
        expected |= {f"{task}/reward": group.rewards.mean(), f"{task}/{source}/reward": group.rewards.mean()}
        expected[f"{task}/response_length/mean"] = group.completion_lengths.mean()
    assert {name: first[name] for name in expected} == pytest.approx(expected)
    assert first["reward"] == pytest.approx(sum(first[f"{task}/reward"] for task in TASKS) / 3)


@pytest.mark.parametrize("mtl", ["equal", "pcgrad"])
def test_a_critic_and_several_tasks(tmp_path: Path, mtl: str) -> None:
    """Groups of one completion, two of each task; steps of two micro-batches."""
    of_ppo = {"config_class": PPOConfig, "num_generations": 1, "critic_learning_rate": 1e-3}
    batch = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    run, plain = run_as_trl_would(
        multi_task_trainer(
            tmp_path, {"mtl": mtl}, trainer_class=CriticTrainer, max_steps=4, loss_type="grpo", **of_ppo, **batch
        ),
        padding="trl",  # AdamW makes full steps of rounding in small gradients
    )
    assert tasks_of(run) == [Counter(dict.fromkeys(TASKS, 2))] * 4
    assert {f"{task}/reward" for task in TASKS} | {"critic/vf_loss"} <= training_logs(plain)[0].keys()
    ours, theirs = run.trainer.critic.model.state_dict(), plain.critic.model.state_dict()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-6 for name in theirs)


@pytest.mark.parametrize("trainer_class", [MultiTaskTrainer, CriticTrainer])
def test_checkpoints_and_evaluations_are_timed_once_and_named(tmp_path: Path, trainer_class: Any) -> None:
    """Both classes of a pair measure; a dictionary of datasets is one evaluation. Logged with the step after."""
    of_ppo = {"config_class": PPOConfig} if trainer_class is CriticTrainer else {}
    saved = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    evaluated = {"eval_dataset": {"math": rows_of_tasks().select([0, 2]), "logic": rows_of_tasks().select([1])}}
    trainer = multi_task_trainer(tmp_path, evaluated, trainer_class=trainer_class, **of_ppo, **saved)()
    noted: list[str] = []
    note = trainer.note_seconds

    def noting(name: str, seconds: float) -> None:
        noted.append(name)
        note(name, seconds)

    trainer.note_seconds = noting
    trainer.add_callback(LogCallback(RunLog(tmp_path / "metrics.jsonl"), dict))
    trainer.train()
    evaluations = [one for one in entries.read(tmp_path / "metrics.jsonl") if "eval_reward" in one]
    assert [one["eval_set"] for one in evaluations] == ["math", "logic"] * 2
    assert noted == ["testing", "save_checkpoint"] * 2
    first, second = training_logs(trainer)
    assert {"timing_s/testing", "timing_s/save_checkpoint"} <= second.keys()
    assert "timing_s/testing" not in first
    of_workers: Any = SimpleNamespace(figures={}, tasks={}, sources={}, step=2, seconds=1.5)
    log_evaluation(trainer, of_workers)
    assert trainer._metrics["train"]["timing_s/testing"][-1] == 1.5


def test_rewards_are_weighted_and_the_remainder_rotates(tmp_path: Path) -> None:
    def none(completions: list[str], **_: Any) -> list[float | None]:
        return [None] * len(completions)

    none.__name__ = letters.__name__
    rewards = {"reward_funcs": [letters, none], "reward_weights": [2.0, 1.0]}
    run, _ = run_as_trl_would(multi_task_trainer(tmp_path, **rewards, per_device_train_batch_size=8, max_steps=3))
    assert [batch.most_common(1)[0][0] for batch in tasks_of(run)] == list(TASKS)
    assert run.trainer.tasks_in_words == "a batch of 4 groups has 1 + 1 + 1 and 1 in turn"
    assert run.logs[0]["logic/reward"] == pytest.approx(
        2 * next(group.rewards[:, 0].mean() for group in run.batches[0] if group.job.row["task"] == "logic")
    )


def test_proportional_is_the_order_of_trl(tmp_path: Path) -> None:
    ours = InProcessRun(multi_task_trainer(tmp_path, {"mtl": "proportional"})).train()
    theirs = InProcessRun(multi_task_trainer(tmp_path, trainer_class=GRPOTrainer)).train()
    order = [[group.job.row for group in run.groups] for run in (ours, theirs)]
    assert order[0] == order[1]
    assert any(count != Counter(TASKS) for count in tasks_of(ours))
    assert ours.trainer.task_quotas is None


@pytest.mark.parametrize(
    ("given", "changes", "says"),
    [
        ({"mtl": "mean"}, {}, r"mtl must be one of equal, proportional, pcgrad, .*, got 'mean'\."),
        ({"mtl": "gradvac"}, {}, "got 'gradvac', which keeps a state between steps"),
        ({"mtl": "upgrad"}, {}, "got 'upgrad', which needs a solver of another package"),
        ({"num_tasks_expected": 6}, {}, "6 tasks were expected, and there are 3: math, logic, code"),
        ({}, {"per_device_train_batch_size": 2 * GROUP_SIZE}, "batch of 2 groups cannot hold 3 tasks. .*proportional"),
        ({}, {"train_dataset": plain_rows()}, "needs a train_dataset with a column task"),
        ({}, {"train_dataset": rows_of_tasks().to_iterable_dataset()}, "needs a train_dataset with a column task"),
        ({}, {"remove_unused_columns": True}, "remove_unused_columns"),
        ({}, {"reward_funcs": [score]}, "No reward for data_source"),
        ({"eval_dataset": rows_of_tasks()}, {"reward_funcs": [score.using({"logic": letters})]}, "source 'code__0'"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(tmp_path: Path, given: Any, changes: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        multi_task_trainer(tmp_path, given, **changes)()


def test_quotas_are_the_floor_and_can_be_left_out(tmp_path: Path) -> None:
    wide = {"per_device_train_batch_size": 7 * GROUP_SIZE}
    assert multi_task_trainer(tmp_path, **wide)().task_quotas == dict.fromkeys(TASKS, 2)
    assert multi_task_trainer(tmp_path, {"ensure_all_tasks_per_step": False}, **wide)().task_quotas is None
    alone = multi_task_trainer(tmp_path, {"mtl": "proportional"}, per_device_train_batch_size=GROUP_SIZE)
    assert alone().task_quotas is None


def test_what_is_replaced_and_where_rewards_are_logged(tmp_path: Path) -> None:
    trainer = multi_task_trainer(tmp_path)()
    assert {"_get_train_sampler", "_generate_and_score_completions"} <= set(overridden(trainer))
    assert not describe_overrides(trainer), "the setup file has written none of them"
    assert list(trainer._logs["rewards"]) == [] and trainer._logs["rewards"]["x"].maxlen is not None


# --- Gradients of tasks: their shares sum to TRL's gradient ------------------------------------------------------


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
def test_shares_that_keep_weights_are_as_equal(tmp_path: Path, changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "task_weights", lambda method, dots, seed: torch.ones(len(dots), dtype=dots.dtype))
    ours, theirs = trained(tmp_path, "pcgrad", **changes), trained(tmp_path, "equal", **changes)
    assert farthest(ours, theirs) < 1e-6
    assert farthest(ours, InProcessRun(multi_task_trainer(tmp_path, max_steps=1))) > 1e-4, "something was learnt"
    assert [one["loss"] for one in ours.logs] == pytest.approx([one["loss"] for one in theirs.logs], abs=1e-6)


def test_a_run_with_pcgrad_is_what_plain_trl_does_and_says_where_tasks_conflict(tmp_path: Path) -> None:
    run, _ = run_as_trl_would(multi_task_trainer(tmp_path, {"mtl": "pcgrad"}, per_device_train_batch_size=12))
    for entry in run.logs:
        assert entry["loss"] == pytest.approx(sum(entry[f"actor/{task}_loss"] for task in TASKS), abs=1e-5)
        assert 0 <= entry["mtl/conflicts"] <= 1 and -1 <= entry["mtl/cosine_min"] <= 1
        assert (entry["mtl/conflicts"] > 0) == (entry["mtl/cosine_min"] < 0)
    assert max(entry["mtl/conflicts"] for entry in run.logs) > 0
    assert run.trainer.gradients_besides == len(TASKS)


def test_conflicting_tasks_are_trained_otherwise_than_with_equal(tmp_path: Path) -> None:
    ours, theirs = trained(tmp_path, "pcgrad"), trained(tmp_path, "equal")
    assert farthest(ours, theirs) > 1e-5
