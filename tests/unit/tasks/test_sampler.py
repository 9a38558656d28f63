"""The order of rows: as TRL's sampler repeats them, with each task in every batch."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.tasks.trainer import TaskSampler

TASKS = ["math"] * 10 + ["logic"] * 2 + ["code"] * 4


def sampler(tasks: list[str] = TASKS, **changes: int | bool) -> TaskSampler:
    return TaskSampler(tasks, **{"group_size": 1, "groups": 4, "repeats": 1, "shuffle": True, "seed": 3, **changes})


def batches(order: list[int], size: int) -> list[list[int]]:
    return [order[start : start + size] for start in range(0, len(order), size)]


@settings(deadline=None, max_examples=100)
@given(
    tasks=st.lists(st.sampled_from("abc"), min_size=6, max_size=40),
    groups=st.integers(3, 8),
    group_size=st.integers(1, 3),
    repeats=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_batch_has_each_task(tasks: list[str], groups: int, group_size: int, repeats: int, shuffle: bool) -> None:
    names = set(tasks)
    one = sampler(tasks, groups=groups, group_size=group_size, repeats=repeats, shuffle=shuffle)
    order = list(one)
    assert len(order) == len(one) == len(tasks) // groups * groups * group_size * repeats
    rounds = batches(order, groups * group_size)
    for at, batch in enumerate(rounds):
        assert batch == rounds[at - at % repeats], "a batch is repeated whole"
        rows = batch[::group_size]
        assert batch == [row for row in rows for _ in range(group_size)]
        counts = Counter(tasks[row] for row in rows)
        assert {counts[name] - groups // len(names) for name in names} <= {0, 1}


def test_the_remainder_goes_to_the_tasks_in_turn() -> None:
    counts = Counter(TASKS[row] for row in sampler(groups=4))
    assert set(counts.values()) <= {5, 6}  # 16 groups for 3 tasks


def test_a_task_that_is_used_up_begins_anew_reshuffled_and_goes_on_in_the_next_epoch() -> None:
    one = sampler(["a"] * 12 + ["b"] * 4, groups=4)
    drawn = [row for _ in range(8) for row in one if row >= 12]
    assert len(drawn) == 64
    passes = batches(drawn, 4)
    assert all(sorted(rows) == [12, 13, 14, 15] for rows in passes)
    assert len(set(map(tuple, passes))) > 4
    of_a = [row for row in islice(one, 16) if row < 12]
    assert len(set(of_a)) == len(of_a)


def test_the_order_is_of_the_seed() -> None:
    assert list(sampler()) == list(sampler()) != list(sampler(seed=4))
    assert [row for row in sampler(shuffle=False) if row < 10] == list(range(6))


@pytest.mark.parametrize("groups", [17, 100])
def test_too_few_rows_are_no_batch(groups: int) -> None:
    assert list(sampler(groups=groups)) == [] and len(sampler(groups=groups)) == 0
