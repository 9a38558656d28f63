"""A setup file for tests: recipes that once trained on something else than in TRL; `TEST_CASE` says which.

Each has more than one of the causes: signals and the trainer's state in rewards, a dataloader, a single turn or a
scoring of the user's own, rewards that are not finite, a tokenizer that two models share, sampling that the model's
own settings change, a reference model.
"""

import math
import os
import signal
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from kit.compared_with_trl import settings
from kit.own_code import Backwards, ReadsOldLogProbabilities, Shortened, judge
from kit.tiny_trainer import build_model, build_tokenizer, letters


def curriculum(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """Sets a handler and an alarm as math-verify does, and divides by the number of steps."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 60)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    progress = 1 + trainer_state.global_step / trainer_state.max_steps + trainer_state.epoch
    return [progress * score for score in letters(completions)]


def infinite_for_one(completions: list[str], target: list[int], **_: Any) -> list[float]:
    return [math.inf if n == 3 else score for n, score in zip(target, letters(completions), strict=True)]


class OwnSingleTurnAndScoring(Shortened):
    def _calculate_rewards(self, *args: Any) -> Any:
        return 3.0 * super()._calculate_rewards(*args)


def make(case: str, output_dir: Path, model_folder: str) -> Any:
    """The `get_trainer()` of a case; it takes further arguments of the trainer."""
    if case == "signals, state and a dataloader":
        return settings(output_dir, trainer_class=Backwards, reward_funcs=curriculum, max_steps=4)
    if case == "a shared tokenizer, infinite rewards and iterations":
        return with_a_reward_model(output_dir)
    if case == "a single turn, a scoring and inherited sampling":
        return with_inherited_sampling(output_dir)
    assert case == "a reference model and old log-probabilities", case
    changes = {"beta": 0.1, "num_iterations": 2, "max_steps": 4}
    return settings(output_dir, trainer_class=ReadsOldLogProbabilities, model=model_folder, **changes)


def with_a_reward_model(output_dir: Path) -> Any:
    def get_trainer(arguments: dict[str, Any] | None = None) -> GRPOTrainer:
        tokenizer = build_tokenizer()
        given = {"reward_processing_classes": [tokenizer, None], **(arguments or {})}
        rewards = [judge(), infinite_for_one]
        trainer = settings(output_dir, given, reward_funcs=rewards, num_iterations=4, max_steps=8)()
        trainer.reward_processing_classes[0] = trainer.processing_class
        return trainer

    return get_trainer


def with_inherited_sampling(output_dir: Path) -> Any:
    def get_trainer(arguments: dict[str, Any] | None = None) -> GRPOTrainer:
        model = build_model(build_tokenizer())
        model.generation_config.min_p = 0.3
        return settings(output_dir, arguments, trainer_class=OwnSingleTurnAndScoring, model=model, max_steps=3)()

    return get_trainer


CASES = (
    "signals, state and a dataloader",
    "a shared tokenizer, infinite rewards and iterations",
    "a single turn, a scoring and inherited sampling",
    "a reference model and old log-probabilities",
)


def get_trainer() -> GRPOTrainer:
    return make(os.environ["TEST_CASE"], Path("checkpoints"), os.environ["TEST_MODEL_FOLDER"])()
