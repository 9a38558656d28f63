"""`--train-of-group` with TRL's trainer: what steps, replays and checkpoints have; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.credit import TurnGRPOTrainer
from async_grpo.errors import AsyncGRPOError
from async_grpo.roles import replay
from async_grpo.settings import TrainingSettings
from async_grpo.training.before_start import refuse
from async_grpo.training.checkpoints import load_batch, save_batch
from async_grpo.training.corrections.rule import rule
from async_grpo.training.corrections.weights import loss_mask
from kit.compared_with_trl import equal_weights
from kit.in_process import InProcessRun
from kit.tiny_trainer import build_trainer

pytestmark = pytest.mark.integration

OF_FOUR = {"num_generations": 4, "per_device_train_batch_size": 8}


def trained(folder: Path, count: int | None = 2, **changes: Any) -> InProcessRun:
    run = InProcessRun(lambda: build_trainer(folder, **{**OF_FOUR, **changes}))
    run.trainer.train_of_group = count
    return run.train()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_step_is_on_two_of_four_with_the_advantages_of_four(scale: str, tmp_path: Path) -> None:
    run = trained(tmp_path, scale_rewards=scale)
    for groups, inputs in zip(run.batches, run.inputs, strict=True):
        advantages = AdvantageRule(scale_rewards=scale).advantages([group.rewards for group in groups])
        expected = [value for of_group in advantages for value in (of_group.min(), of_group.max())]
        assert sorted(inputs["advantages"].tolist()) == pytest.approx(sorted(expected), abs=1e-4)
        rewards = np.concatenate([group.rewards[:, 0] for group in groups])
        assert len(set(rewards.tolist())) > len(groups), "there is something to choose from"
        assert inputs["num_items_in_batch"] == loss_mask(inputs).sum() < sum(map(_tokens, groups))
    assert run.logs[0]["reward"] == pytest.approx(np.mean([group.rewards for group in run.batches[0]]))


def _tokens(group: Any) -> int:
    return int(group.completion_lengths.sum())


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_the_gradient_of_a_step_is_that_of_trls_loss_on_the_kept_rows(loss_type: str, tmp_path: Path) -> None:
    """In two micro-batches, of which each has half of the rows: TRL's loss on all of them at once is the reference."""
    changes = {"loss_type": loss_type, "learning_rate": 0.0, "max_steps": 1, "adam_epsilon": 1e-5}
    one = trained(tmp_path, **changes, max_grad_norm=1e9)
    whole = one.inputs[0]
    half = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    two = trained(tmp_path, **changes, **half, max_grad_norm=1e9)
    assert [len(part["advantages"]) for part in two.trainer._buffered_inputs] == [2, 2]
    assert sorted(whole["advantages"].tolist()) == sorted(two.inputs[0]["advantages"].tolist())
    if loss_type != "bnpo":  # which divides by the tokens of a micro-batch
        assert two.logs[0]["grad_norm"] == pytest.approx(one.logs[0]["grad_norm"], rel=1e-3)
    plain: Any = build_trainer(tmp_path, **changes, num_generations=2, per_device_train_batch_size=4)
    plain.current_gradient_accumulation_steps = 1
    plain.model.train()
    loss = plain._compute_loss(plain.model, {**whole, "old_per_token_logps": whole["sampling_per_token_logps"]})
    loss.backward()
    norm = torch.cat([it.grad.flatten() for it in plain.model.parameters() if it.grad is not None]).norm()
    assert one.logs[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_a_replay_trains_on_the_same_rows(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", max_steps=3)
    assert not _replayed(run, TrainingSettings(), tmp_path / "all"), "a replay on all rows is another training"
    assert _replayed(run, TrainingSettings(train_of_group=2), tmp_path / "same")


def _replayed(run: InProcessRun, settings: TrainingSettings, folder: Path) -> bool:
    """Whether a replay of the run with these settings has its weights."""
    folder.mkdir()
    again = build_trainer(folder, **OF_FOUR, max_steps=3)
    replay._train(again, iter(run.batches), rule("bypass"), settings, folder)
    return equal_weights(run.trainer.model, again.model)


def test_a_checkpoint_in_the_middle_of_a_batch_has_the_kept_rows(tmp_path: Path) -> None:
    run = trained(tmp_path, num_iterations=2, steps_per_generation=2, max_steps=3)
    batch = run.trainer.batch_after_step
    assert batch is not None and batch.passes_done == 3
    save_batch(tmp_path, batch)
    loaded = load_batch(tmp_path, torch.device("cpu"))
    kept = [advantage for inputs in loaded.inputs for advantage in inputs["advantages"].tolist()]
    assert len(kept) == 8 and sorted(kept) == sorted(run.inputs[-1]["advantages"].tolist())


class OwnLoss(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return model(inputs["prompt_ids"]).logits.sum()


@pytest.mark.parametrize(
    ("count", "changes", "says"),
    [
        (1, {}, "must leave 2 or more"),
        (4, {}, "less than all"),
        (3, {"per_device_train_batch_size": 2, "steps_per_generation": 2}, r"forward pass of 2. What fits: 2\."),
        (2, {"per_device_train_batch_size": 1, "steps_per_generation": 4}, "_batch_size a multiple of 4"),
        (2, {"trainer_class": OwnLoss}, "OwnLoss has its own, which may need whole groups"),
        (2, {"trainer_class": TurnGRPOTrainer, "arguments": {"turn_reward_funcs": []}}, "TurnGRPOTrainer has its own"),
    ],
)
def test_what_is_refused(count: int, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, **{**OF_FOUR, **changes})
    with pytest.raises(AsyncGRPOError, match=rf"--train-of-group {count}.*{says}"):
        refuse(trainer, TrainingSettings(train_of_group=count), None)


def test_a_group_that_two_ranks_share_is_refused(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, **OF_FOUR)
    refuse(trainer, TrainingSettings(train_of_group=2), None)
    trainer.args.per_device_train_batch_size = 2  # as of two ranks
    with pytest.raises(AsyncGRPOError, match=r"each process has 2 completions of a generation batch, .* groups of 4"):
        refuse(trainer, TrainingSettings(train_of_group=2), None)
