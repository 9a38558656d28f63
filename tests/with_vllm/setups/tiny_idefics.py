"""A setup file for tests with vLLM: a random model of Idefics3's shape, which vLLM's CPU build can import and compute.

vLLM's module of most other vision models imports torchvision, which the environment of the tests has not.
"""

import sys
from pathlib import Path

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from trl import GRPOTrainer

sys.path[:0] = [str(Path(__file__).parents[3] / "examples" / folder) for folder in (".", "images")]
import my_trainer  # noqa: E402
from tiny_model import build_tokenizer, small_config  # noqa: E402
from tiny_vlm_model import never_sample  # noqa: E402

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZE, PATCH, TOGETHER = 16, 4, 2  # pixels of a tile and of a patch, and patches by the side that make a token
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def build_processor(tokenizer):
    """A picture is scaled to 32 pixels and cut into tiles, as Idefics3 has it, so its tokens have a pattern."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fake_token_around_image>", "<image>", *TILES]})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<global-img>", "<end_of_utterance>"]})
    images = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIZE}, max_image_size={"longest_edge": SIZE})
    tokens = (SIZE // PATCH // TOGETHER) ** 2
    return Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=CHAT_TEMPLATE)


def build_vlm(tokenizer):
    text = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # of 32 dimensions
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIZE,
        "patch_size": PATCH,
        "initializer_range": 0.2,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=TOGETHER,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config)
    never_sample(model, model.model.text_model, [config.image_token_id])
    return model


def get_trainer():
    tokenizer = build_tokenizer()
    processor = build_processor(tokenizer)
    return GRPOTrainer(
        model=build_vlm(tokenizer),
        processing_class=processor,
        reward_funcs=[my_trainer.named],
        train_dataset=my_trainer.squares(),
        args=small_config("outputs/images", max_completion_length=4, learning_rate=3e-3),
    )
