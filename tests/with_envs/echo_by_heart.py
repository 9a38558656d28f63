"""A setup file with an environment of OpenEnv (at OPENENV_URL); its model acts once it has its weights (LEARNT)."""

from __future__ import annotations

import os

from trl import GRPOTrainer

from async_grpo.envs.openenv import openenv_environment
from kit.learnt_by_heart import build_actor
from kit.tiny_trainer import chat_rows


def get_trainer() -> GRPOTrainer:
    environment = openenv_environment(os.environ["OPENENV_URL"])
    return build_actor(chat_rows(1), [], environment_factory=environment)
