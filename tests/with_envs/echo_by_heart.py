"""A setup file with an environment of OpenEnv (at OPENENV_URL); its model acts once it has its weights (LEARNT)."""

from __future__ import annotations

import os
from pathlib import Path

from in_process import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer, chat_rows
from learnt_by_heart import load_learnt
from trl import GRPOTrainer

from async_grpo.envs.openenv import openenv_environment


def get_trainer() -> GRPOTrainer:
    trainer = build_trainer(
        Path("outputs"),
        model=build_model(build_tokenizer(), hidden_size=64, head_dim=32, intermediate_size=192),
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=chat_rows(1),
        reward_funcs=[],
        arguments={"environment_factory": openenv_environment(os.environ["OPENENV_URL"])},
        max_completion_length=250,
        max_steps=6,
        per_device_train_batch_size=2,
        temperature=0.3,
    )
    if "LEARNT" in os.environ:
        load_learnt(trainer, Path(os.environ["LEARNT"]))
    return trainer
