"""A step of several generation batches: each begins as its groups come, with the gradients of one whole batch."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from async_grpo.records import RolloutGroup
from async_grpo.tasks.gradients import OF_BATCHES, OF_ROWS, OF_TOKENS
from async_grpo.training.before_start import describe_parts, of_the_batch
from kit.compared_with_trl import settings
from kit.in_process import InProcessRun
from kit.runs import SETUP, audited, command, finish, lines_of, steps_logged
from kit.tiny_trainer import build_model, build_tokenizer, plain_rows

pytestmark = pytest.mark.integration

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


def trained(folder: Path, model_folder: str, batches: list[list[RolloutGroup]] | None, **changes: Any) -> InProcessRun:
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
    whole = trained(tmp_path, model_folder, None, **WHOLE, **changes)
    lengths = {int(length) for group in whole.groups for length in group.completion_lengths}
    assert len(whole.groups) == 18 and len(lengths) > 5
    parts = [[batch[at] for at in pair] for batch in whole.batches for pair in ((5, 0), (3, 2), (4, 1))]
    streamed = trained(tmp_path, model_folder, parts, **PARTS, **changes)
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
    """The reward of the second group waits until the first one was trained on: another run would never end."""
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
