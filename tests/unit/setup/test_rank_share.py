"""The rows of a rank: all of a batch are somebody's, and nobody needs a group without rows of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.setup.rank_share import own_groups, own_share


@pytest.mark.parametrize(
    ("ranks", "each", "n"), [(1, 8, 4), (2, 8, 4), (2, 8, 16), (4, 3, 2), (3, 8, 1), (8, 1, 8), (4, 6, 8)]
)
def test_every_row_is_of_one_rank(ranks: int, each: int, n: int) -> None:
    rows = [*range(ranks * each)]
    groups = [rows[first : first + n] for first in range(0, len(rows), n)]
    for rank in range(ranks):
        trainer: Any = SimpleNamespace(
            args=SimpleNamespace(generation_batch_size=len(rows)),
            accelerator=SimpleNamespace(num_processes=ranks, process_index=rank),
            num_generations=n,
        )
        had = groups if rank == 0 else groups[own_groups(trainer, rank)]
        assert own_share(trainer, [row for group in had for row in group]) == rows[rank * each : (rank + 1) * each]
        assert rank == 0 or all(rank in {row // each for row in group} for group in had)
