"""A setup file for tests: `TEST_CASE` says what in it is not in a run as it is in plain TRL."""

import os
import random
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from trl import GRPOTrainer

from kit.tiny_trainer import build_model, build_tokenizer, build_trainer, letters

CASE = os.environ["TEST_CASE"]
calls = 0


def counts_calls(completions: list[Any], **_: Any) -> list[float]:
    global calls
    calls += 1
    return [float(calls)] * len(completions)


def draws(completions: list[Any], **_: Any) -> list[float]:
    return [random.random() for _ in completions]


class Warmer(TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        trainer.generation_config.temperature = 0.5


class Halved(GRPOTrainer):
    def _calculate_rewards(self, inputs: Any, *args: Any) -> Any:
        return super()._calculate_rewards(inputs, *args) / len(inputs)


def shortened(self: Any, *args: Any, **kwargs: Any) -> Any:
    ids, logprobs = of_trl(self, *args, **kwargs)
    return [each[:3] for each in ids], logprobs


REWARDS = {"counter": counts_calls, "draws": draws}
trainer: Any = None

if CASE == "patched":
    of_trl, GRPOTrainer._generate_single_turn = GRPOTrainer._generate_single_turn, shortened


def get_trainer() -> GRPOTrainer:
    global trainer
    changes = {"attention_dropout": 0.3} if CASE == "dropout" else {}
    trainer = build_trainer(
        Path("outputs"),
        model=build_model(build_tokenizer(), **changes),
        reward_funcs=REWARDS.get(CASE, letters),
        trainer_class=Halved if CASE == "scoring" else GRPOTrainer,
        arguments={"callbacks": [Warmer()] if CASE == "generation_config" else []},
        num_iterations=2 if CASE == "dropout" else 1,
        save_strategy="steps",
    )
    if CASE == "collator":
        trainer.data_collator = lambda rows: [{**row, "prompt": row["prompt"] + "!"} for row in rows]
    return trainer
