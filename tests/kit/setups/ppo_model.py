"""The random model, trained by PPO: groups of one completion, and a critic.

`TEST_SHARDED` is 1 where FSDP2 shards policy and critic over the processes of the trainer (`sharded_model.py`).
"""

import os
from functools import partial

import random_model
from sharded_model import sharding_config
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from async_grpo.credit import PPOConfig, PPOTrainer


class CriticIsSharded(TrainerCallback):
    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *args, **kwargs):
        assert all(isinstance(parameter, DTensor) for parameter in self._trainer.critic.model.parameters())


def get_trainer() -> GRPOTrainer:
    sharded = os.environ.get("TEST_SHARDED") == "1" and int(os.environ.get("WORLD_SIZE", "1")) > 1
    config = partial(sharding_config, PPOConfig) if sharded else PPOConfig
    trainer = random_model.build(PPOTrainer, config, num_generations=1, critic_learning_rate=1e-3, lam=0.95)
    if sharded:
        trainer.add_callback(CriticIsSharded(trainer))
    return trainer
