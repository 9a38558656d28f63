"""The trainer of `random_model`, whose evaluations are decoded by the head in the folder `head`."""

from pathlib import Path

from random_model import get_trainer as unguided

from async_grpo_experiments.guidance import guided


def get_trainer():
    return guided(unguided(), head=Path("head"), eta=0.3, mode="contrastive")
