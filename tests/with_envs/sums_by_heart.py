"""A setup file with an environment of verifiers, and a model that calls a tool once it has its weights (LEARNT)."""

from __future__ import annotations

from trl import GRPOTrainer

from async_grpo.envs.verifiers import load_environment
from kit.learnt_by_heart import build_actor


def get_trainer() -> GRPOTrainer:
    environment = load_environment({"taskset": {"id": "sums_taskset", "count": 1}})
    return build_actor(environment.dataset, environment.reward, rollout_func=environment.rollout)
