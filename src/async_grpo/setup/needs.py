"""What a reward function needs of the machine, asked before a run and not with the first completion."""

from __future__ import annotations

from typing import Any


def check_needs(trainer: Any) -> None:
    """Call `require`, and `require_for` with the trainer's datasets, of each reward function that has it.

    Both raise what the first call would raise.
    """
    for function in trainer.reward_funcs:
        if callable(require := getattr(function, "require", None)):
            require()
        if callable(require_for := getattr(function, "require_for", None)):
            require_for(trainer.train_dataset, trainer.eval_dataset)
