"""Tokenizers of given words, and small transformers for them, so that no world needs a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def words_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token a word, in this order, between spaces; then `<pad>` and `<eos>`."""
    vocabulary = {word: index for index, word in enumerate([*words, "<pad>", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def small_transformer(tokenizer: Any, *, width: int = 64, layers: int = 2, seed: int = 0, scale: float = 0.02) -> Any:
    """A Qwen3 with random weights, which may say every token."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(head_dim=16, initializer_range=scale, **_shape(tokenizer, width, layers)))


def endless_transformer(tokenizer: Any, *, width: int = 32, layers: int = 2, seed: int = 0, scale: float = 0.2) -> Any:
    """A Phi with random weights that never says `<pad>` or `<eos>`: its output has a bias, and theirs is −10,000."""
    torch.manual_seed(seed)
    model = PhiForCausalLM(PhiConfig(initializer_range=scale, **_shape(tokenizer, width, layers)))
    with torch.no_grad():
        model.lm_head.bias[[tokenizer.pad_token_id, tokenizer.eos_token_id]] = -1e4
    return model


def _shape(tokenizer: Any, width: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 16,
        "max_position_embeddings": 256,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def save(folder: Path, model: Any, tokenizer: Any) -> str:
    """Save both as a folder that every algorithm takes as its reference; returns its name."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
