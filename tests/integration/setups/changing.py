"""The random model, with a patch of TRL's trainer and a callback that makes completions longer by one each step."""

import argparse

import random_model
from transformers import TrainerCallback
from trl import GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=2)
FIRST = parser.parse_args().length
scored_by_trl = GRPOTrainer._calculate_rewards


def scored(self, *args, **kwargs):
    return 100 * scored_by_trl(self, *args, **kwargs)


GRPOTrainer._calculate_rewards = scored


class Longer(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        self.trainer.generation_config.max_new_tokens = FIRST + state.global_step


def get_trainer() -> GRPOTrainer:
    callback = Longer()
    trainer = callback.trainer = random_model.get_trainer()
    trainer.generation_config.max_new_tokens = FIRST
    trainer.add_callback(callback)
    return trainer
