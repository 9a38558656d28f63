"""Prompts with images: name the colour of a square. The column `image` holds PIL images, as TRL documents it."""

import sys
from pathlib import Path

from datasets import Dataset
from PIL import Image
from tiny_vlm_model import build_processor, build_vlm
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tiny_model
from tiny_model import build_tokenizer, small_config

COLOURS = ["red", "green", "blue"]


def squares() -> Dataset:
    """Columns: `prompt` and `image`, which the model sees, and `colour`, which the reward function sees too."""
    prompt = [{"role": "user", "content": "what colour is it?"}]
    return Dataset.from_list(
        [
            {"prompt": prompt, "image": Image.new("RGB", (16 + 8 * (size % 3), 16), colour), "colour": colour}
            for size in range(20)
            for colour in COLOURS
        ]
    )


def named(completions, colour, image, **_) -> list[float]:
    """The share of letters that are in the name of the colour. Reward functions also get the images."""
    assert all(picture.getpixel((0, 0)) for picture in image)
    answers = [answer[-1]["content"] for answer in completions]
    return [sum(letter in right for letter in text) / max(1, len(text)) for text, right in zip(answers, colour)]


def get_trainer() -> GRPOTrainer:
    tokenizer = build_tokenizer()
    processor = build_processor(tokenizer)
    return GRPOTrainer(
        model=build_vlm(tokenizer),
        processing_class=processor,
        reward_funcs=[named],
        train_dataset=squares(),
        args=small_config("outputs/images", max_completion_length=4, learning_rate=3e-3),
    )
