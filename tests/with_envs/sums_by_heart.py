"""A setup file with an environment of verifiers, and a model that calls a tool once it has its weights (LEARNT)."""

from __future__ import annotations

import os
from pathlib import Path

from in_process import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer
from learnt_by_heart import load_learnt
from trl import GRPOTrainer

from async_grpo.envs.verifiers import load_environment


def get_trainer() -> GRPOTrainer:
    environment = load_environment({"taskset": {"id": "sums_taskset", "count": 1}})
    trainer = build_trainer(
        Path("outputs"),
        model=build_model(build_tokenizer(), hidden_size=64, head_dim=32, intermediate_size=192),
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=environment.dataset,
        reward_funcs=environment.reward,
        arguments={"rollout_func": environment.rollout},
        max_completion_length=250,
        max_steps=6,
        per_device_train_batch_size=2,
        temperature=0.3,
    )
    if "LEARNT" in os.environ:
        load_learnt(trainer, Path(os.environ["LEARNT"]))
    return trainer
