"""What a dry run knows of a trainer, of the few values that a test is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from async_grpo.checks.plan.trainer_facts import Parameters, TrainerFacts
from async_grpo.setup.grpo_config.batch import Batch

MILLION = 1_000_000


def batch(size: int = 8, *, group: int = 8, passes: int = 1, processes: int = 1, **changes: Any) -> Batch:
    return replace(
        Batch(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=passes,
            steps_per_generation=passes,
            generation_batch_size=size * passes * processes,
            num_generations=group,
            processes=processes,
        ),
        **changes,
    )


def facts(**changes: Any) -> TrainerFacts:
    values: dict[str, Any] = {
        "trainer": "GRPOTrainer",
        "model": "Qwen3ForCausalLM",
        "model_name": "",
        "parameters": Parameters(
            count=MILLION,
            trained=MILLION,
            nbytes=2 * MILLION,
            trained_bytes=2 * MILLION,
            dtypes={"bfloat16": 2 * MILLION},
        ),
        "reference_bytes": 0,
        "slots": 3,
        "precision": "bf16",
        "optimizer": "adamw_torch_fused",
        "learning_rate": 1e-6,
        "loss_type": "dapo",
        "beta": 0.0,
        "temperature": 1.0,
        "use_vllm": False,
        "batch": batch(),
        "max_steps": 100,
        "epochs": 1.0,
        "dataset_rows": 64,
        "rewards": ["accuracy"],
        "padding_token": "<pad>",
        "end_token": "<eos>",
        "max_completion_length": 256,
        "context_length": 4096,
        "longest_prompt": 100,
        "prompts_measured": 64,
        "output_dir": "/somewhere/outputs",
        "save_strategy": "steps",
        "save_steps": 50,
        "seed": 42,
        "epoch_rounds": 64,
        "groups_ahead": 5,
        "first_groups": 2,
        "generator": "vllm",
    }
    return TrainerFacts(**{**values, **changes})
