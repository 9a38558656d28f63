"""A setup file for tests: `random_model.py` with `TEST_TASKS` tasks (2) whose rewards disagree, trained with PCGrad.

The first task wants long completions, the second short ones, the third ends in 7. With `TEST_SHARDED`, several
processes shard the model by FSDP2.
"""

import os
from typing import Any

import random_model
from datasets import Dataset
from trl import GRPOTrainer

from async_grpo.tasks import MultiTask

NAMES = ["long", "short", "seven"][: int(os.environ.get("TEST_TASKS", "2"))]


class Trainer(MultiTask, GRPOTrainer): ...


def disagreeing(completions: list[str], task: list[str], **_: Any) -> list[float]:
    rewards = {"long": len, "short": lambda text: -len(text), "seven": lambda text: 4 * text.count("7")}
    return [float(rewards[name](completion)) for name, completion in zip(task, completions)]


def trainer_of_tasks(**given: Any) -> Trainer:
    prompts = given.pop("train_dataset")["prompt"]
    rows = Dataset.from_list([{"prompt": it, "task": NAMES[at % len(NAMES)]} for at, it in enumerate(prompts)])
    return Trainer(**{**given, "reward_funcs": [disagreeing], "train_dataset": rows}, mtl="pcgrad")


def get_trainer() -> GRPOTrainer:
    random_model.GRPOTrainer = trainer_of_tasks
    if os.environ.get("TEST_SHARDED"):
        import sharded_model

        return sharded_model.get_trainer()
    return random_model.get_trainer()
