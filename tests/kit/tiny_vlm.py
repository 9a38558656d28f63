"""The tiny model of Qwen2.5-VL's shape that the examples have, as a user's trainer; rows with pictures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from trl import GRPOTrainer

from kit.tiny_trainer import build_tokenizer, config, letters

sys.path.append(str(Path(__file__).parents[2] / "examples" / "images"))
from tiny_vlm_model import build_processor, build_vlm


def picture(seed: int, width: int = 16, height: int = 16, mode: str = "RGB") -> Image.Image:
    """Noise, different for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def build_vlm_trainer(
    output_dir: Path,
    *,
    train_dataset: Any,
    reward_funcs: Any = letters,
    chat_template: str | None = None,
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> GRPOTrainer:
    """A user's trainer of the tiny model, as `tiny_trainer.build_trainer`."""
    tokenizer = build_tokenizer(chat_template)
    processor = build_processor(tokenizer)
    return trainer_class(
        model=build_vlm(tokenizer, initializer_range=0.3),
        processing_class=processor,
        reward_funcs=reward_funcs,
        train_dataset=train_dataset,
        args=config(output_dir, **changes),
        **(arguments or {}),
    )


class Gallery:
    """Shows an image at its start, and another whenever it is asked to."""

    def reset(self, **row: Any) -> list[dict[str, Any]]:
        self.target = row["target"]
        return [{"type": "image", "image": picture(self.target, 16 + 8 * (self.target % 2))}]

    def look(self) -> list[dict[str, Any]]:
        """Look at another image.

        Returns:
            The image.
        """
        return [{"type": "image", "image": picture(100 + self.target)}, {"type": "text", "text": "here"}]
