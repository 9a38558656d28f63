"""A task whose every token decides: write 12 letters backwards, then end the text.

The reward is 1 for the whole answer and 0 for any other, so each of 13 tokens can spoil it. The model, 0.34 M
parameters, is warmed up on answers in which some letters are slips: it knows the rule, and slips as often.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.setups.quiet import quiet_config
from benchmarks.setups.warm import learn, load_warm_start
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

LETTERS = 12
HELD_OUT = 300
TRAINED_ON = 2000
SLIPS = 0.18  # of the letters: one answer of eleven is right
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
WARM_START = {"steps": 150, "batch_size": 64, "seed": 0}  # steps of each part: without slips, and with them
RATES = {0.0: 3e-3, SLIPS: 1e-3}
SETTINGS = {
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": LETTERS + 1,
    "learning_rate": 4e-4,
    "lr_scheduler_type": "constant",
}


def words(*, held_out: bool) -> list[str]:
    randomness = random.Random(0)
    everything = ["".join(randomness.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(HELD_OUT + TRAINED_ON)]
    return everything[:HELD_OUT] if held_out else everything[HELD_OUT:]


def backwards(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 for exactly the right letters, else 0."""
    return [float(completion == prompt[-2::-1]) for prompt, completion in zip(prompts, completions, strict=True)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter; the prompt ends with `>`."""
    vocabulary = {token: index for index, token in enumerate([*string.ascii_lowercase, ">", "<pad>", "<eos>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(tokenizer: Any) -> Qwen3ForCausalLM:
    """The warm-started model; the first process that asks for it trains it, in half a minute."""
    end = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WARM_START["seed"])
        model = Qwen3ForCausalLM(Qwen3Config(**MODEL, vocab_size=len(tokenizer), **end))
        load_warm_start(
            model, f"reverse-{LETTERS}-{SLIPS:.4f}-{WARM_START['steps']}", lambda: _warm_up(model, tokenizer)
        )
    return model


def _warm_up(model: Any, tokenizer: Any) -> None:
    for slips, rate in RATES.items():
        learn(model, _batches(tokenizer, slips), steps=WARM_START["steps"], learning_rate=rate)


def _batches(tokenizer: Any, slips: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of random words: not those of the task."""
    randomness = torch.Generator().manual_seed(WARM_START["seed"])
    size = (WARM_START["batch_size"], LETTERS)
    while True:
        letters = torch.randint(26, size, generator=randomness)
        others = torch.randint(1, 26, size, generator=randomness)
        answer = (letters.flip(1) + others * (torch.rand(size, generator=randomness) < slips)) % 26
        mark, end = (torch.full((size[0], 1), tokenizer.convert_tokens_to_ids(token)) for token in (">", "<eos>"))
        prompt = torch.cat([letters, mark], dim=1)
        yield torch.cat([prompt, answer, end], dim=1), torch.cat([torch.full_like(prompt, -100), answer, end], dim=1)


@torch.no_grad()
def held_out_accuracy(model: Any, tokenizer: Any) -> float:
    """The mean probability of the right answer, sampled at temperature 1, to words that training never sees: exact."""
    asked = words(held_out=True)
    ids = torch.tensor(tokenizer([f"{word}>{word[::-1]}<eos>" for word in asked])["input_ids"])
    logprobs = model(ids[:, :-1], use_cache=False).logits[:, LETTERS:].float().log_softmax(-1)
    return float(logprobs.gather(2, ids[:, LETTERS + 1 :, None])[:, :, 0].sum(1).exp().mean())


def build_trainer(output_dir: Path, seed: int, steps: int, **changes: Any) -> GRPOTrainer:
    tokenizer = build_tokenizer()
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[backwards],
        train_dataset=Dataset.from_list([{"prompt": f"{word}>"} for word in words(held_out=False)]),
        args=quiet_config(output_dir, seed, steps, SETTINGS | changes),
    )
