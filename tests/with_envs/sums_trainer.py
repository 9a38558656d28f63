"""A setup file with an environment of verifiers, and a model of random weights."""

from __future__ import annotations

from pathlib import Path

from trl import GRPOTrainer

from async_grpo.envs.verifiers import load_environment
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer


def get_trainer() -> GRPOTrainer:
    environment = load_environment({"taskset": {"id": "sums_taskset", "count": 4}})
    return build_trainer(
        Path("outputs"),
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=environment.dataset,
        reward_funcs=environment.reward,
        arguments={"rollout_func": environment.rollout},
        max_completion_length=12,
        max_steps=2,
    )
