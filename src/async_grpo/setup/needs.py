"""What a reward function needs of the machine, asked before a run and not with the first completion."""

from __future__ import annotations

from typing import Any


def check_needs(trainer: Any) -> None:
    """Call `require` of each reward function that has it. It raises what the first call would raise."""
    for function in trainer.reward_funcs:
        require = getattr(function, "require", None)
        if callable(require):
            require()
