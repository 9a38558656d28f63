"""The order of rows when each batch is to hold every task: rows of the tasks in turn, each task in its own shuffle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import torch
from torch.utils.data import Sampler


class TaskSampler(Sampler[int]):
    """Yields row numbers as TRL's `RepeatSampler` repeats them, with as many groups of each task in every batch.

    Where the groups of a batch are no multiple of the tasks, the remainder goes to the tasks in turn. An epoch is as
    many batches as the rows fill. A task that is used up starts again, reshuffled, and goes on in the next epoch.

    Args:
        tasks: of each row, its task.
        group_size: times that a row comes in a row, `num_generations`.
        groups: of a generation batch.
        repeats: times that a batch comes in a row.
    """

    def __init__(
        self, tasks: Sequence[str], *, group_size: int, groups: int, repeats: int, shuffle: bool, seed: int
    ) -> None:
        rows: dict[str, list[int]] = {}
        for row, task in enumerate(tasks):
            rows.setdefault(task, []).append(row)
        self._group_size, self._groups, self._repeats, self._shuffle = group_size, groups, repeats, shuffle
        self._batches = len(tasks) // groups
        self._generator = torch.Generator()
        self._generator.manual_seed(seed)
        self._next = cycle([self._rows_of_task(own) for own in rows.values()])

    def __len__(self) -> int:
        return self._batches * self._groups * self._group_size * self._repeats

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._batches):
            batch = [next(rows) for rows in islice(self._next, self._groups)]
            for _ in range(self._repeats):
                for row in batch:
                    yield from [row] * self._group_size

    def _rows_of_task(self, rows: Sequence[int]) -> Iterator[int]:
        """The rows of one task, again and again."""
        while True:
            order: Sequence[int] = range(len(rows))
            if self._shuffle:
                order = torch.randperm(len(rows), generator=self._generator, device="cpu").tolist()
            yield from (rows[place] for place in order)
