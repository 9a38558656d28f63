"""Which finished groups make a batch that is to have its share of each task."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

Quotas = Mapping[str, int]  # groups of each task in every batch; their sum is at most the size of a batch


def with_each_task(
    by_age: Sequence[int], finished: Container[int], task_of: Mapping[int, str], quotas: Quotas, size: int
) -> list[int] | None:
    """The groups of a batch; None as long as it has to wait.

    Of each task it has its quota, or as many groups as are under way, if they are fewer: the oldest finished ones. The
    rest are the oldest finished groups of any task. So it only ever waits for groups that are under way.

    Args:
        by_age: sequence numbers of the groups under way, finished ones among them, the oldest first.
        size: of a batch, in groups.
    """
    chosen: list[int] = []
    for task, quota in quotas.items():
        under_way = [seq for seq in by_age if task_of[seq] == task]
        there = [seq for seq in under_way if seq in finished][:quota]
        if len(there) < min(quota, len(under_way)):
            return None
        chosen += there
    others = [seq for seq in by_age if seq in finished and seq not in chosen]
    chosen += others[: size - len(chosen)]
    return chosen if len(chosen) == size else None
