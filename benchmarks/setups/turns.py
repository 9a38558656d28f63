"""A task with answers of 64 tokens: go on with two digits, in turn.

The prompt `37` asks for `3`, `7`, `3`, `7`, ...: each digit is the one two positions before. The reward is the share of
digits for which that is so, and a slip costs one of them, or two. The model of the demo, larger by the positions, is
warmed up on answers in which 30% of the digits are slips: it knows the rule, and slips as often.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.setups.quiet import quiet_config
from benchmarks.setups.warm import learn, load_warm_start
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src" / "app"))
import trainer_setup_tiny as tiny

TOKENS = 64
HELD_OUT = 20  # of 100 prompts
SLIPS = 0.3
WARM_START = {"steps": 300, "batch_size": 32, "learning_rate": 3e-3, "seed": 0}
SETTINGS = {
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": TOKENS,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
}
EVALUATED = 16  # sampled answers of each held-out prompt


def prompts(*, held_out: bool) -> list[str]:
    everything = [f"{number:02}" for number in range(100)]
    random.Random(0).shuffle(everything)
    return everything[:HELD_OUT] if held_out else everything[HELD_OUT:]


def in_turn(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of digits that are those two positions before."""
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    return [sum(map(str.__eq__, text, text[2:])) / TOKENS for text in texts]


def build_model(tokenizer: Any) -> Qwen3ForCausalLM:
    """The warm-started model; the first process that asks for it trains it, in about a minute."""
    shape = {**tiny.MODEL, "max_position_embeddings": 2 * TOKENS}
    end = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WARM_START["seed"])
        model = Qwen3ForCausalLM(Qwen3Config(**shape, vocab_size=len(tokenizer), **end))
        steps, rate = int(WARM_START["steps"]), WARM_START["learning_rate"]
        load_warm_start(
            model,
            f"turns-{TOKENS}-{steps}-{SLIPS:.4f}",
            lambda: learn(model, _batches(tokenizer), steps=steps, learning_rate=rate),
        )
    return model


def _batches(tokenizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    randomness = torch.Generator().manual_seed(int(WARM_START["seed"]))
    asked = torch.tensor(tokenizer(prompts(held_out=False))["input_ids"])
    while True:
        rows = asked[torch.randint(len(asked), (int(WARM_START["batch_size"]),), generator=randomness)]
        answers = _with_slips(rows, randomness)
        yield torch.cat([rows, answers], dim=1), torch.cat([torch.full_like(rows, -100), answers], dim=1)


def _with_slips(rows_BP: torch.Tensor, randomness: torch.Generator) -> torch.Tensor:
    """Answers [B, TOKENS] to these prompts; a digit's token id is its value."""
    slips = torch.rand((len(rows_BP), TOKENS), generator=randomness) < SLIPS
    others = torch.randint(1, 10, (len(rows_BP), TOKENS), generator=randomness)
    digits = [*rows_BP.unbind(1)]
    for position in range(TOKENS):
        digits.append((digits[-2] + others[:, position] * slips[:, position]) % 10)
    return torch.stack(digits[2:], dim=1)


def build_trainer(output_dir: Path, seed: int, steps: int, **changes: Any) -> GRPOTrainer:
    tokenizer = tiny.build_tokenizer()
    return GRPOTrainer(
        model=build_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=[in_turn],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts(held_out=False)]),
        args=quiet_config(output_dir, seed, steps, SETTINGS | changes),
    )


@torch.no_grad()
def held_out_accuracy(model: Any, tokenizer: Any) -> float:
    """The share of right digits in `EVALUATED` sampled answers to each held-out prompt."""
    asked = [prompt for prompt in prompts(held_out=True) for _ in range(EVALUATED)]
    ids = torch.tensor(tokenizer(asked)["input_ids"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        mask = torch.ones_like(ids)
        found = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    texts = tokenizer.batch_decode(found[:, ids.shape[1] :])
    return sum(in_turn(asked, texts)) / len(asked)
