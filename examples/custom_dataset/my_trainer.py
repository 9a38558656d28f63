"""A dataset from a JSONL file: each line becomes a prompt; its other columns go to the reward function."""

import sys
from pathlib import Path

from datasets import Dataset, load_dataset
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tiny_model
from tiny_model import build_model, build_tokenizer, small_config

FILE = Path(__file__).parent / "questions.jsonl"


def questions() -> Dataset:
    """Columns: `prompt`, which the model sees, and `answer` and `topic`, which the reward function sees."""
    rows = load_dataset("json", data_files=str(FILE), split="train")
    rows = rows.filter(lambda row: len(row["question"]) < 60)
    return rows.map(lambda row: {"prompt": f"question: {row['question']}\nanswer: "}, remove_columns=["question"])


def answered(completions: list[str], answer: list[str], topic: list[str], **_) -> list[float]:
    """1 for the answer; where it must be a number, a tenth for any digit."""
    rewards = []
    for completion, right, about in zip(completions, answer, topic):
        near = about == "arithmetic" and any(character.isdigit() for character in completion)
        rewards.append(1.0 if right in completion.split() else 0.1 * near)
    return rewards


def get_trainer() -> GRPOTrainer:
    tokenizer = build_tokenizer()
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[answered],
        train_dataset=questions(),
        args=small_config("outputs/custom_dataset"),
    )
