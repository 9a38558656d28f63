"""A random model of Qwen2.5-VL's shape with 70,000 parameters and its processor, so that the example needs no download.

In a setup file of your own, `model="Qwen/Qwen2.5-VL-3B-Instruct"` replaces both.
"""

import torch
from transformers import ProcessorMixin, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


class ImageProcessor(Qwen2_5_VLProcessor):
    """Without the part for videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def build_processor(tokenizer):
    """Patches of 4 pixels, of which 2 by 2 make a token. The tokenizer gets the tokens that stand for images."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *VISION_TOKENS]})
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return ImageProcessor(images, tokenizer, chat_template=tokenizer.chat_template or CHAT_TEMPLATE)


def build_vlm(tokenizer, initializer_range=0.1):
    """The same random weights in every process. `tokenizer` is that of `build_processor`."""
    token = tokenizer.convert_tokens_to_ids
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,  # of 32 dimensions, which vLLM's CPU build can compute
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": initializer_range,
        "tie_word_embeddings": False,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
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
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2_5_VLForConditionalGeneration(config)
    never_sample(model, model.model.language_model, [token(name) for name in VISION_TOKENS])
    return model


def never_sample(model, decoder, tokens):
    """Keep the first value of the decoder's hidden state at 4 for text, and let it speak against these tokens.

    A trained model does not write tokens that stand for images. A random one would.
    """
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 4.0
        for layer in decoder.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[tokens] = 0
        model.lm_head.weight[tokens, 0] = -30.0
