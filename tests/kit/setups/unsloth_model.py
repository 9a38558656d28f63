"""A setup file for tests: `random_model.py` as a file that uses Unsloth would write it, Unsloth imported first."""

import unsloth  # isort: skip
import random_model
from trl import GRPOTrainer


def get_trainer() -> GRPOTrainer:
    random_model.GRPOTrainer = unsloth.patched(GRPOTrainer)
    return random_model.get_trainer()
