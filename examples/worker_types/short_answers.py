"""A worker that has a judge and writes short answers, e.g. on a small GPU."""

from server import Judge, build_trainer
from trl import GRPOTrainer


def get_trainer() -> GRPOTrainer:
    return build_trainer(Judge(), max_completion_length=8)
