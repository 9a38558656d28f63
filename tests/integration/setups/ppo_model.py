"""The random model, trained by PPO: groups of one completion, a critic, KL in the reward."""

import random_model
from trl import GRPOTrainer

from async_grpo.credit import PPOConfig, PPOTrainer


def get_trainer() -> GRPOTrainer:
    return random_model.build(PPOTrainer, PPOConfig, num_generations=1, critic_learning_rate=1e-3, lam=0.95)
