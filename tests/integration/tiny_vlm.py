"""A tiny model of Qwen2.5-VL's shape with its processor, built without a network, and rows with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_process import build_tokenizer, config, letters
from PIL import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import GRPOTrainer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def build_vlm_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with the tokens that stand for pictures."""
    tokenizer = build_tokenizer(CHAT_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS})
    return tokenizer


class ImageProcessor(Qwen2_5_VLProcessor):
    """Without the part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def build_processor() -> Qwen2_5_VLProcessor:
    """Patches of 4 pixels, of which 2 by 2 make a token."""
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return ImageProcessor(images, build_vlm_tokenizer(), None, chat_template=CHAT_TEMPLATE)


def build_vlm(seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    tokenizer = build_vlm_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    made = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(made)
    never_sample(model, [tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS])
    return model


def never_sample(model: Qwen2_5_VLForConditionalGeneration, tokens: list[int]) -> None:
    """Keep the first value of the hidden state at 4 for text, and let it speak against these tokens."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 4.0
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[tokens] = 0
        model.lm_head.weight[tokens, 0] = -30.0


def picture(seed: int, width: int = 16, height: int = 16, mode: str = "RGB") -> Image.Image:
    """Noise, different for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def build_vlm_trainer(
    output_dir: Path,
    *,
    train_dataset: Any,
    reward_funcs: Any = letters,
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> GRPOTrainer:
    """A user's trainer of the tiny model, as `in_process.build_trainer`."""
    return trainer_class(
        model=build_vlm(),
        processing_class=build_processor(),
        reward_funcs=reward_funcs,
        train_dataset=train_dataset,
        args=config(output_dir, **changes),
        **(arguments or {}),
    )
