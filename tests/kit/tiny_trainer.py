"""A user's trainer of a tiny model, with its tokenizer, its rows and its rewards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from async_grpo.setup.replaced import note_originals
from async_grpo.setup.trl_compat import repair_trl

repair_trl()
note_originals()
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
transformers_logging.set_verbosity_error()

GROUP_SIZE = 2
QWEN3_CHAT_TEMPLATE = qwen3_chat_template
PROMPTS = ["a", "bc", "def?", "g h", "ij", "k", "lmnop", "q", "r s", "tuv", "wx", "y", "zz", "1+1"]
_PRINTABLE = [chr(code) for code in range(32, 127)] + ["\n"]


def build_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character, and Qwen3's marks of turns."""
    vocabulary = {token: index for index, token in enumerate([*_PRINTABLE, "<pad>", "<|im_start|>", "<|im_end|>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    characters.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        padding_side="left",
        chat_template=chat_template,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Random weights, large enough for its distributions not to be uniform."""
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = Qwen3Config(**{**settings, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def plain_rows(count: int = len(PROMPTS)) -> Dataset:
    """`prompt` as text, and a column `target` for reward functions."""
    return Dataset.from_list([{"prompt": text, "target": len(text)} for text in PROMPTS[:count]])


def chat_rows(count: int = len(PROMPTS)) -> Dataset:
    """`prompt` as messages, and a column `target` for reward functions."""
    rows = [{"prompt": [{"role": "user", "content": text}], "target": len(text)} for text in PROMPTS[:count]]
    return Dataset.from_list(rows)


def text_of(completion: Any) -> str:
    """What the model wrote, of a plain or a conversational completion."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def letters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs between random completions: the share of lower-case letters."""
    return [sum(c.islower() for c in text_of(x)) / max(1, len(text_of(x))) for x in completions]


def length(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(text_of(x))) for x in completions]


def config(output_dir: Path, config_class: type[GRPOConfig] = GRPOConfig, **changes: Any) -> GRPOConfig:
    """4 prompts of 2 completions a step, on the CPU, everything logged, unless `changes` say otherwise."""
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 1e-3,  # or Adam's first step would turn a gradient's rounding error into a full step
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
    }
    return config_class(**{**settings, **changes})


def build_trainer(
    output_dir: Path,
    *,
    model: Any = None,
    reward_funcs: Any = letters,
    train_dataset: Any = None,
    chat_template: str | None = None,
    trainer_class: type[GRPOTrainer] = GRPOTrainer,
    config_class: type[GRPOConfig] = GRPOConfig,
    arguments: dict[str, Any] | None = None,
    **changes: Any,
) -> GRPOTrainer:
    """A user's trainer, as their `get_trainer()` would build it.

    Args:
        arguments: of the trainer, e.g. `peft_config`.
        changes: of the `GRPOConfig`, e.g. `loss_type`.
    """
    tokenizer = build_tokenizer(chat_template)
    arguments = dict(arguments or {})
    if train_dataset is None and "environment_factory" not in arguments:
        train_dataset = plain_rows() if chat_template is None else chat_rows()
    return trainer_class(
        model=build_model(tokenizer) if model is None else model,
        processing_class=tokenizer,
        reward_funcs=list(reward_funcs) if isinstance(reward_funcs, list) else reward_funcs,  # TRL adds to it
        train_dataset=train_dataset,
        args=config(output_dir, config_class, **changes),
        **arguments,
    )
