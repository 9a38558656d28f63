"""The server's setup file. The server never calls its rewards, so they need no judge; only their names matter."""

import sys
from pathlib import Path

from datasets import Dataset
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tiny_model
from tiny_model import build_model, build_tokenizer, small_config


class Judge:
    """A placeholder for a reward that only workers can compute: a judge model, a sandbox, a licence."""

    def score(self, text: str) -> float:
        return sum(character.isalpha() for character in text) / max(1, len(text))


def build_trainer(judge: Judge | None, **settings) -> GRPOTrainer:
    """What all types of processes have in common: model, dataset, and the names of the rewards."""

    def judged(completions: list[str], **_) -> list[float]:
        if judge is None:
            raise RuntimeError("This process has no judge: it must not score.")
        return [judge.score(completion) for completion in completions]

    tokenizer = build_tokenizer()
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[judged],
        train_dataset=Dataset.from_dict({"prompt": ["say", "tell", "write", "sing"]}),
        args=small_config("outputs/worker_types", **settings),
    )


def get_trainer() -> GRPOTrainer:
    return build_trainer(judge=None)
