"""Three tasks on four digits: their sum as two numbers, the digits sorted, and the larger of the two numbers.

`+0741>` is `48`, `s0741>` is `0147`, `?0741>` is `41`. The reward is 1 for the whole answer. The model is that of the
recipe, 0.19 M parameters, warmed up on answers in which some digits are slips. The tasks have 600, 300 and 100 rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.setups.quiet import quiet_config
from benchmarks.setups.sums import tiny
from benchmarks.setups.warm import learn, load_warm_start
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from async_grpo.credit import PPOConfig, PPOTrainer
from async_grpo.tasks import MultiTask

MARKS = {"sums": "+", "sorting": "s", "comparing": "?"}
ROWS = {"sums": 600, "sorting": 300, "comparing": 100}
HELD_OUT = 200  # of each
SLIPS = 0.35  # of the digits
WARM_START = {"steps": 500, "batch_size": 96, "seed": 0}  # of each part: without slips, and with them
RATES = {0.0: 4e-3, SLIPS: 1e-3}
SETTINGS = {
    "per_device_train_batch_size": 96,
    "max_completion_length": 5,
    "learning_rate": 4e-4,
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
}


class GRPO(MultiTask, GRPOTrainer): ...


class PPO(MultiTask, PPOTrainer): ...


def right(task: str, digits: str) -> str:
    one, two = digits[:2], digits[2:]
    if task == "sorting":
        return "".join(sorted(digits))
    return max(one, two) if task == "comparing" else f"{int(one) + int(two):02}"


def problems(task: str, *, held_out: bool) -> list[str]:
    """Four digits each; the numbers of a sum are below 50."""
    randomness, limit = random.Random(task), 50 if task == "sums" else 100
    every = [f"{one:02}{two:02}" for one in range(limit) for two in range(limit)]
    drawn = randomness.sample(every, HELD_OUT + ROWS[task])
    return drawn[:HELD_OUT] if held_out else drawn[HELD_OUT:]


def rows() -> list[dict[str, str]]:
    return [
        {"prompt": f"{mark}{digits}>", "task": task, "answer": right(task, digits)}
        for task, mark in MARKS.items()
        for digits in problems(task, held_out=False)
    ]


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: index for index, token in enumerate([*"0123456789+s?>", "<pad>", "<eos>"])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(tokenizer: Any, **shape: int) -> Qwen3ForCausalLM:
    """The warm-started model, or a random one of another shape."""
    end = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(WARM_START["seed"])
        model = Qwen3ForCausalLM(Qwen3Config(**{**tiny.MODEL, **shape}, vocab_size=len(tokenizer), **end))
        if not shape:
            load_warm_start(model, f"three_tasks-{SLIPS}-{WARM_START['steps']}", lambda: _warm_up(model, tokenizer))
    return model


def _warm_up(model: Any, tokenizer: Any) -> None:
    for slips, rate in RATES.items():
        learn(model, _batches(tokenizer, slips), steps=WARM_START["steps"], learning_rate=rate)


def _batches(tokenizer: Any, slips: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of problems that are not held out."""
    randomness = random.Random(WARM_START["seed"])
    held_out = {task: set(problems(task, held_out=True)) for task in MARKS}
    limits = {task: 50 if task == "sums" else 100 for task in MARKS}
    while True:
        texts: list[str] = []
        while len(texts) < WARM_START["batch_size"]:
            task = randomness.choice([*MARKS])
            digits = "".join(f"{randomness.randrange(limits[task]):02}" for _ in range(2))
            if digits not in held_out[task]:
                taught = [
                    str(randomness.randrange(10)) if randomness.random() < slips else it for it in right(task, digits)
                ]
                texts.append(f"{MARKS[task]}{digits}>{''.join(taught)}<eos>")
        ids = [tokenizer(text)["input_ids"] for text in texts]
        tokens = torch.tensor([row + [tokenizer.pad_token_id] * (11 - len(row)) for row in ids])
        labels = tokens.masked_fill(tokens == tokenizer.pad_token_id, -100)
        labels[:, :6] = -100
        yield tokens, labels


@torch.no_grad()
def held_out_accuracy(model: Any, tokenizer: Any) -> dict[str, float]:
    """By task, the mean probability of the right answer, sampled at temperature 1: exact."""
    found = {}
    for task, mark in MARKS.items():
        asked = problems(task, held_out=True)
        ids = torch.tensor(tokenizer([f"{mark}{it}>{right(task, it)}<eos>" for it in asked])["input_ids"])
        logprobs = model(ids[:, :-1], use_cache=False).logits[:, 5:].float().log_softmax(-1)
        found[task] = float(logprobs.gather(2, ids[:, 6:, None])[:, :, 0].sum(1).exp().mean())
    return found


def build_trainer(
    kind: str, mtl: str, output_dir: Path, *, seed: int, steps: int, shape: dict[str, int] | None = None, **changes: Any
) -> Any:
    """Build a trainer of the three tasks: 96 completions a step, in groups of 8 (`GRPO`) or of one (`PPO`).

    Args:
        shape: of a random model in place of the warm-started one.
        changes: of its configuration.
    """
    tokenizer = build_tokenizer()
    own = {"num_generations": 8} if kind == "GRPO" else {"num_generations": 1, "critic_learning_rate": 1e-3}
    own |= changes
    return (GRPO if kind == "GRPO" else PPO)(
        model=build_model(tokenizer, **(shape or {})),
        processing_class=tokenizer,
        reward_funcs=[is_right],
        train_dataset=Dataset.from_list(rows()),
        mtl=mtl,
        args=quiet_config(output_dir, seed, steps, SETTINGS | own, GRPOConfig if kind == "GRPO" else PPOConfig),
    )
