"""A setup file for tests: the configuration that the seed `TEST_DRAWN` draws, with the model in `TEST_MODEL_FOLDER`."""

import os
from pathlib import Path

from random_configurations import trainer_of
from trl import GRPOTrainer


def get_trainer() -> GRPOTrainer:
    return trainer_of(int(os.environ["TEST_DRAWN"]), Path("checkpoints"), os.environ["TEST_MODEL_FOLDER"])()
