"""Which rows of a generation batch a process of the trainer has: TRL cuts it into equal parts, in the order of ranks.

A part may begin and end within a prompt group, which then has rows of several ranks. Rank 0 has all groups, another
rank those with rows of its own.
"""

from __future__ import annotations

from typing import Any


def own_groups(trainer: Any, rank: int) -> slice:
    """Return which groups of a generation batch have rows of this rank."""
    size, n = _size(trainer), trainer.num_generations
    return slice(rank * size // n, -(-(rank + 1) * size // n))


def own_share(trainer: Any, completions: Any) -> Any:
    """Return the entries of this process, of one entry for each completion of the groups that it has."""
    if trainer.accelerator.num_processes == 1:
        return completions
    size = _size(trainer)
    first = trainer.accelerator.process_index * size % trainer.num_generations
    return completions[first : first + size]


def _size(trainer: Any) -> int:
    return int(trainer.args.generation_batch_size // trainer.accelerator.num_processes)
