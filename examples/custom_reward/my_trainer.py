"""Three rewards: a function of the completion, one that uses a column of the dataset, one that waits for a judge."""

import asyncio
import sys
from pathlib import Path

from datasets import Dataset
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tiny_model
from tiny_model import build_model, build_tokenizer, small_config

PROMPTS = ["one plus one is", "the colour of the sky is", "seven minus two is", "a cat says"]
WANTED = ["2", "blue", "5", "meow"]


def brief(completions: list[str], **_) -> list[float]:
    """From 0 for 16 characters to 1 for none."""
    return [1 - len(completion) / 16 for completion in completions]


def right_letters(completions: list[str], wanted: list[str], log_metric, **_) -> list[float]:
    """The share of the wanted answer's letters that occur. `wanted` is the dataset's column of that name."""
    shares = [len(set(completion) & set(word)) / len(set(word)) for completion, word in zip(completions, wanted)]
    log_metric("all_letters", sum(share == 1 for share in shares) / len(shares))  # a curve of its own
    return shares


async def judge(prompts: list[str], completions: list[str], **_) -> list[float | None]:
    """A slow judge behind a network. None: no verdict, only the other rewards count."""

    async def ask(completion: str) -> float | None:
        await asyncio.sleep(0.05)  # yours: await client.post(...)
        return None if not completion else float(completion[0].isalpha())

    return list(await asyncio.gather(*(ask(completion) for completion in completions)))


def get_trainer() -> GRPOTrainer:
    tokenizer = build_tokenizer()
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[brief, right_letters, judge],
        train_dataset=Dataset.from_dict({"prompt": PROMPTS, "wanted": WANTED}),
        args=small_config("outputs/custom_reward", reward_weights=[0.2, 1.0, 0.5]),
    )
