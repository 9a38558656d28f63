"""Two tasks in one run: sums and sorting, from parquet files that are generated at the first start."""

import os
import sys
from pathlib import Path

from trl import GRPOTrainer

from async_grpo.tasks import MultiTask, load, score

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tiny_model
sys.path.insert(0, str(Path(__file__).parent))  # for toy_tasks
from tiny_model import build_model, build_tokenizer, small_config
from toy_tasks import write

FILES, HELD_OUT = write(Path("outputs/tasks/data"), "sums", "sorting")


def same_characters(completions: list[str], ground_truth: list[str], **_) -> list[float]:
    """The share of the answer's characters that are in their place."""
    return [
        sum(one == right for one, right in zip(completion, answer)) / max(len(completion), len(answer))
        for completion, answer in zip(completions, ground_truth)
    ]


class Trainer(MultiTask, GRPOTrainer):
    """Put before another class, `MultiTask` does the same for that one: `class Trainer(MultiTask, TurnGRPOTrainer)`."""


def get_trainer() -> Trainer:
    tokenizer = build_tokenizer()
    return Trainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[score.using({"toy": same_characters})],
        train_dataset=load(FILES),
        eval_dataset=load(HELD_OUT, separate=True),
        mtl=os.environ.get("MTL", "equal"),
        num_tasks_expected=2,
        args=small_config("outputs/tasks", max_completion_length=4, max_steps=20),
    )
