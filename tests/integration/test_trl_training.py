"""What TRL does around the training step: callbacks, evaluation, checkpoints; and what is said before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOTrainer

from async_grpo.errors import UnsupportedError
from async_grpo.setup.overrides import check_callbacks
from async_grpo.setup.setup_file import _failed
from async_grpo.training.corrections.checks import describe_noise
from kit.compared_with_trl import settings
from kit.in_process import InProcessRun
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer, plain_rows

pytestmark = pytest.mark.integration


class Noting(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[str] = []
        for name in ("train_begin", "step_end", "log", "train_end"):
            setattr(self, f"on_{name}", lambda *_, name=name, **__: self.heard.append(name))


def test_callbacks_run_in_the_trainer_only(tmp_path: Path) -> None:
    made: list[Noting] = []

    def get_trainer() -> GRPOTrainer:
        made.append(Noting())
        return build_trainer(tmp_path, arguments={"callbacks": [made[-1]]})

    InProcessRun(get_trainer).train()
    assert [it.heard for it in made] == [["train_begin", "step_end", "log", "step_end", "log", "log", "train_end"], []]


class OwnProgress(ProgressCallback):
    begun = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self.begun += 1


class OwnPrinter(PrinterCallback): ...


@pytest.mark.parametrize("own", [OwnProgress, OwnPrinter])
def test_a_progress_bar_of_the_users_stays_and_transformers_own_goes(own: type[Any], tmp_path: Path) -> None:
    for silent in (True, False):  # transformers adds its printer, or its bar
        given = own()
        run = InProcessRun(settings(tmp_path, {"callbacks": [given]}, disable_tqdm=silent))
        kept = [
            it for it in run.trainer.callback_handler.callbacks if isinstance(it, (ProgressCallback, PrinterCallback))
        ]
        assert kept == [given]
    if own is OwnProgress:
        run.train()
        assert given.begun == 1


class RewardAndCallback(TrainerCallback):
    __name__ = "both"

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    def reward(self, completions: list[Any], **_: Any) -> list[float]:
        return self(completions)


@pytest.mark.parametrize("method", [False, True], ids=["object", "its method"])
def test_a_reward_that_is_a_callback_as_well_is_refused(method: bool, tmp_path: Path) -> None:
    both = RewardAndCallback()
    rewards = [both.reward if method else both]
    check_callbacks(build_trainer(tmp_path, reward_funcs=rewards, arguments={"callbacks": [RewardAndCallback()]}))
    trainer = build_trainer(tmp_path, reward_funcs=rewards, arguments={"callbacks": [both]})
    with pytest.raises(UnsupportedError, match=r"RewardAndCallback is a callback and a reward.*trainer_state"):
        check_callbacks(trainer)


def test_evaluation_generates_in_the_trainer(tmp_path: Path) -> None:
    each_step = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 4}
    get_trainer = settings(tmp_path, {"eval_dataset": plain_rows(4)}, **each_step)
    run = InProcessRun(get_trainer).train()
    plain = get_trainer()
    plain.train()
    ours, theirs = ([one for one in it.state.log_history if "eval_reward" in one] for it in (run.trainer, plain))
    assert [entry["step"] for entry in ours] == [0, 1, 2]
    assert [set(entry) for entry in ours] == [set(entry) for entry in theirs]
    assert len(run.batches) == 2, "evaluation must take no group from the workers"
    assert ours[0]["eval_reward"] == pytest.approx(theirs[0]["eval_reward"])  # same weights, same seed
    assert len(run.logs) == 2


def test_checkpoints_are_told_and_rotated(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3)).train()
    assert run.checkpoints == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert run.trainer.args.save_total_limit == 1


@pytest.mark.parametrize(("rate", "disabled", "told"), [(0.05, False, True), (0.05, True, False), (0.0, False, False)])
def test_dropout_that_workers_do_not_have_is_told(rate: float, disabled: bool, told: bool, tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=rate)
    trainer = build_trainer(tmp_path, arguments={"peft_config": adapter}, disable_dropout=disabled)
    assert ("dropout (0.05)" in describe_noise(trainer)) is told


def test_noise_in_embeddings_that_workers_do_not_have_is_told(tmp_path: Path) -> None:
    said = describe_noise(build_trainer(tmp_path, neftune_noise_alpha=5.0))
    assert "noise in its embeddings (neftune_noise_alpha=5.0) and workers sample without it" in said
    assert "neftune_noise_alpha=None in the GRPOConfig" in said


MADE = build_model(build_tokenizer())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"beta": 0.1}, "the reference model of beta > 0. Set beta=0"),
        ({"trainer_class": lambda **given: GRPOTrainer(**{**given, "processing_class": None})}, "the tokenizer. Pass"),
        ({"reward_funcs": AutoModelForSequenceClassification.from_config(MADE.config)}, "the tokenizer of a reward"),
    ],
)
def test_what_trl_loads_by_the_name_of_a_model_that_has_none(changes: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(OSError) as failure:
        build_trainer(tmp_path, model=MADE, **changes)
    said = _failed("", failure.value, Path(__file__))
    assert said.startswith("A model that was made in code has no name (") and f"and TRL loads by it {what}" in said
