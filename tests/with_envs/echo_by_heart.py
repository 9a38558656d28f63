"""A setup file with an environment of OpenEnv (at OPENENV_URL); its model acts once it has its weights (LEARNT)."""

from __future__ import annotations

import os

from trl import GRPOTrainer

from async_grpo.envs.openenv import openenv_environment
from kit.in_process import chat_rows
from kit.learnt_by_heart import build_actor


def get_trainer() -> GRPOTrainer:
    environment = openenv_environment(os.environ["OPENENV_URL"])
    return build_actor(chat_rows(1), [], environment_factory=environment)
