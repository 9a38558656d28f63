"""The setup file of a generation whose second part is timed, when all workers have answered once.

GENERATION_WORKERS says how many there are, and the seconds go to the file GENERATION_SECONDS.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from async_grpo.evals.asking import Plan, SampleRequest
from async_grpo_experiments.worlds.tiny import endless_transformer, words_tokenizer

PROBLEMS, SAMPLES, TOKENS = 24, 8, 64
LETTERS = "abcdefgh"
SHAPE = {"width": 1024, "layers": 16} if torch.cuda.is_available() else {"width": 256, "layers": 4}


def plan(problems: int) -> Plan:
    seen: set[str] = set()
    while len(seen) < int(os.environ["GENERATION_WORKERS"]):
        groups = yield [SampleRequest(problem=problem) for problem in range(4)]
        seen.update(group.worker for group in groups if group is not None)
    began = time.monotonic()
    yield [SampleRequest(problem=problem, samples=SAMPLES) for problem in range(problems)]
    Path(os.environ["GENERATION_SECONDS"]).write_text(str(time.monotonic() - began))


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def get_trainer() -> GRPOTrainer:
    tokenizer = words_tokenizer(LETTERS)
    trainer = GRPOTrainer(
        endless_transformer(tokenizer, **SHAPE),
        length,
        args=GRPOConfig(
            output_dir="unused",
            per_device_train_batch_size=SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            temperature=1.0,
            beta=0.0,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": LETTERS[number % 8]} for number in range(PROBLEMS)]),
        processing_class=tokenizer,
    )
    trainer.generation_plan = plan
    return trainer
