"""Steps on a part of each group (`--train-of-group`), and on a part of the groups, as they come."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.credit import TurnGRPOTrainer
from async_grpo.errors import AsyncGRPOError
from async_grpo.records import RolloutGroup
from async_grpo.roles import replay
from async_grpo.settings import TrainingSettings
from async_grpo.tasks.gradients import OF_BATCHES, OF_ROWS, OF_TOKENS
from async_grpo.training.before_start import describe_parts, of_the_batch, refuse
from async_grpo.training.checkpoints import load_batch, save_batch
from async_grpo.training.corrections.rule import rule
from async_grpo.training.corrections.weights import loss_mask
from kit.compared_with_trl import equal_weights, settings
from kit.in_process import InProcessRun
from kit.runs import SETUP, audited, command, finish, lines_of, steps_logged
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer, plain_rows

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


# --- A step of several generation batches: -----------------------------------------------------------------------

WHOLE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "steps_per_generation": 3}
PARTS = {**WHOLE, "steps_per_generation": 1}
UNEVEN = {"max_completion_length": 60, "max_steps": 3, "scale_rewards": "none", "train_dataset": plain_rows(12)}
REFERENCE: dict[str, Any] = {"beta": 0.1}
OF_ROWS_TOO = ({"scale_rewards": "group"}, REFERENCE, {"importance_sampling_level": "sequence"})
SAME = [*({"loss_type": loss} for loss in OF_ROWS), *({"loss_type": "grpo", **changes} for changes in OF_ROWS_TOO)]
OF_ROWS_BESIDE = [{"loss_type": loss} for loss in OF_TOKENS] + [{"loss_type": "grpo", "entropy_coef": 0.1}]
OF_THE_BATCH = [
    *({"loss_type": loss} for loss in OF_BATCHES),
    {"loss_type": "grpo", "scale_rewards": "batch"},
    {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
]


class Given(InProcessRun):
    """Trains on groups that were made before, batch by batch."""

    def __init__(self, get_trainer: Callable[[], GRPOTrainer], batches: list[list[RolloutGroup]]) -> None:
        self._given = iter(batches)
        super().__init__(get_trainer)

    def _generate(self) -> list[RolloutGroup]:
        return next(self._given)


def compared(folder: Path, model_folder: str, batches: list[list[RolloutGroup]] | None, **changes: Any) -> InProcessRun:
    """A training by gradient descent: a difference of gradients is one of weights."""

    def get_trainer() -> GRPOTrainer:
        model = build_model(build_tokenizer()).double()  # float32 would round small moves of large weights
        optimizer = (torch.optim.SGD(model.parameters(), lr=0.5), None)
        model.name_or_path = model.config._name_or_path = model_folder  # where TRL loads a reference model
        return settings(folder, {"optimizers": optimizer}, model=model, **{**UNEVEN, **changes})()

    run = InProcessRun(get_trainer) if batches is None else Given(get_trainer, batches)
    return run.train()


def farthest(one: InProcessRun, other: InProcessRun) -> float:
    """Between the weights, as a share of the largest move of a weight."""
    start = build_model(build_tokenizer()).double().state_dict()
    ends = [run.trainer.model.state_dict() for run in (one, other)]
    moved = max(float((ends[0][name] - start[name]).abs().max()) for name in start)
    assert moved > 1e-4, "nothing was learnt"
    return max(float((ends[0][name] - ends[1][name]).abs().max()) for name in start) / moved


@pytest.mark.parametrize("changes", [*SAME, *OF_ROWS_BESIDE, *OF_THE_BATCH], ids=str)
def test_parts_have_the_gradient_of_the_whole_batch(changes: dict[str, Any], tmp_path: Path, model_folder: str) -> None:
    whole = compared(tmp_path, model_folder, None, **WHOLE, **changes)
    lengths = {int(length) for group in whole.groups for length in group.completion_lengths}
    assert len(whole.groups) == 18 and len(lengths) > 5
    parts = [[batch[at] for at in pair] for batch in whole.batches for pair in ((5, 0), (3, 2), (4, 1))]
    streamed = compared(tmp_path, model_folder, parts, **PARTS, **changes)
    assert streamed.versions == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    apart = farthest(whole, streamed)
    assert (apart < 1e-5) if changes in SAME else (apart > 1e-3), apart
    assert bool(of_the_batch(streamed.trainer)) is (changes in OF_THE_BATCH)
    assert describe_parts(streamed.trainer).startswith("each of the 3 generation batches of a step is trained on as")
    assert describe_parts(whole.trainer) == ""


WAITING = """
import sys, time
from pathlib import Path
sys.path.insert(0, {setups!r})
import random_model
from transformers import TrainerCallback

FILES, calls = Path({files!r}), 0

def wait_for(name):
    while not (FILES / name).exists():
        time.sleep(0.02)

def reward(completions, **_):
    global calls
    calls += 1
    wait_for({{2: "0 has begun", 4: "go on"}}.get(calls, "."))
    return [float(len(completion)) for completion in completions]

class Says(TrainerCallback):
    def on_substep_end(self, args, state, control, **_):
        (FILES / f"{{state.global_step}} has begun").touch()

def get_trainer():
    random_model.reward = reward
    trainer = random_model.get_trainer()
    trainer.add_callback(Says())
    return trainer
"""


def test_a_micro_batch_is_trained_on_before_the_last_group_and_a_stop_loses_nothing(tmp_path: Path) -> None:
    """The reward of the second group waits until the first one was compared on: another run would never end."""
    setup = tmp_path / "setup.py"
    setup.write_text(WAITING.format(setups=str(SETUP.parent), files=str(tmp_path)))
    shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    flags = [flag for name, value in shape.items() for flag in ("--set", f"{name}={value}")]
    arguments = ("train", str(setup), "-n", "1", "--steps", "4", "--max-staleness", "0", "--stop-grace", "60", *flags)
    with command(*arguments, cwd=tmp_path) as run:
        run.wait_until((tmp_path / "1 has begun").exists, "the second step's first part")
        assert steps_logged(tmp_path / "worker") == [1]
        run.process.send_signal(signal.SIGTERM)
        run.wait_until((tmp_path / "checkpoints/checkpoint-1/trainer_state.json").exists, "the checkpoint")
        (tmp_path / "go on").touch()
        run.wait()
        assert "each of the 2 generation batches of a step is trained on as soon as its groups are there" in run.output
    finish(tmp_path, "--resume", "--set", "steps_per_generation=2", setup=setup)
    assert "OK: all 8 groups accounted for (8 used once)" in audited(tmp_path / "worker")
    used = [line for line in lines_of(tmp_path / "worker" / "consumed.jsonl") if "seqs" in line]
    assert [(line["step"], line["seqs"]) for line in used[:3]] == [(1, [0]), (1, [1]), (2, [2, 3])]
    assert all(line["policy_versions"] == [line["version_used"]] * len(line["seqs"]) for line in used)
