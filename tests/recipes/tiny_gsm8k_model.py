"""What the GSM8K recipe needs, small: a random Qwen3 with its own tokenizer, and a folder with the data.

Both are for `MODEL_PATH` and `GSM8K_PATH`:

    make_tiny_qwen3(tmp_path / "model")
    gsm8k_folder(tmp_path)
"""

import json
import math
import random
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

REAL_GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
END_OF_TEXT = "<|endoftext|>"
HIDDEN_SIZE = 64


def make_tiny_qwen3(path: Path, mean_completion_tokens: int = 16, head_dim: int = 16) -> Path:
    """Write a random Qwen3 (about 0.2 M parameters) and a tokenizer without chat template, as base models have.

    Completions are random text that ends by itself, on average after `mean_completion_tokens`.
    """
    tokenizer = train_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "hidden_size": HIDDEN_SIZE, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}  # 32 for vLLM on a CPU
    marks = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(**sizes, **heads, **marks, max_position_embeddings=4096, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    end_texts_early(model, tokenizer.eos_token_id, mean_completion_tokens)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: takes any text, and has a few merges so that prompts are not one token a letter."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"special_tokens": [END_OF_TEXT], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **special)
    sentences = [row["question"] + " " + row["answer"] for row in generated_rows(50, seed=2)]
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def end_texts_early(model: Qwen3ForCausalLM, eos_token_id: int, mean_tokens: int) -> None:
    """One coordinate of the residual stream is large and constant; only the end of text's logit reads it."""
    vocabulary = model.config.vocab_size
    odds = (vocabulary - 1) / (mean_tokens - 1)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0  # after the last norm: about sqrt(hidden size)
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[eos_token_id, 0] = math.log(odds) / math.sqrt(HIDDEN_SIZE)


def gsm8k_folder(tmp_path: Path) -> Path:
    """The real GSM8K where it lies next to the checkout; otherwise a few generated rows of its format."""
    if (REAL_GSM8K / "train.jsonl").is_file() and (REAL_GSM8K / "test.jsonl").is_file():
        return REAL_GSM8K
    folder = tmp_path / "gsm8k_generated"
    warnings.warn(f"No GSM8K next to the checkout: generated a few rows of its format in {folder}.", stacklevel=2)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", 32, 0), ("test", 8, 1)):
        lines = [json.dumps(row) + "\n" for row in generated_rows(count, seed)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def generated_rows(count: int, seed: int) -> list[dict[str, str]]:
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        apples, boxes = chance.randint(2, 40), chance.randint(2, 40)
        total = apples * boxes
        question = f"There are {apples} apples in each of {boxes} boxes. How many apples are there?"
        answer = f"{apples} * {boxes} = <<{apples}*{boxes}={total}>>{total} apples.\n#### {total:,}"
        rows.append({"question": question, "answer": answer})
    return rows
