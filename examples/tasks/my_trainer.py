"""Two tasks in one run, by PPO with a critic: sums and sorting, from parquet files that the first start generates."""

import sys
from pathlib import Path

from async_grpo.credit import PPOConfig, PPOTrainer
from async_grpo.tasks import MultiTask, load, score

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tiny_model
sys.path.insert(0, str(Path(__file__).parent))  # for toy_tasks
from tiny_model import build_model, build_tokenizer, small_config
from toy_tasks import write

FILES, HELD_OUT = write(Path("outputs/tasks/data"), "sums", "sorting")


def same_characters(completions: list[str], ground_truth: list[str], **_) -> list[float]:
    """The share of the answer's characters that are at their positions."""
    return [
        sum(one == right for one, right in zip(completion, answer)) / max(len(completion), len(answer))
        for completion, answer in zip(completions, ground_truth)
    ]


class Trainer(MultiTask, PPOTrainer):
    """Put before another class, `MultiTask` does the same for that one: `class Trainer(MultiTask, GRPOTrainer)`."""


def get_trainer() -> Trainer:
    tokenizer = build_tokenizer()
    return Trainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[score.using({"toy": same_characters})],
        train_dataset=load(FILES),
        eval_dataset=load(HELD_OUT, separate=True),
        mtl="pcgrad",
        num_tasks_expected=2,
        args=small_config(
            "outputs/tasks",
            PPOConfig,
            num_generations=1,
            critic_learning_rate=1e-3,
            max_completion_length=4,
            max_steps=20,
        ),
    )
