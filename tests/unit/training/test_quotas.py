"""Batches that have their share of each task, from a queue in memory whose workers the test plays."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from async_grpo.errors import AllGroupsFailedError
from async_grpo.training.before_start import MOST_NAMED, describe_tasks
from async_grpo.training.rollout_source import with_each_task
from kit.training_fakes import Bench, begun, schedule, seqs

TASKS = ("math", "logic")


def bench(B: int = 4, K: int = 2, tasks: tuple[str, ...] = TASKS, **options: object) -> Bench:
    quotas = dict.fromkeys(tasks, B // len(tasks))
    return begun(schedule(B=B, K=K), tasks=tasks, **{"quotas": quotas, **options})


def tasks_of(batch: list) -> Counter[str]:
    return Counter(group.job.task for group in batch)


def test_a_job_has_the_task_of_its_row() -> None:
    two, none = bench(), begun(schedule(B=2))
    assert [two.queue.jobs[seq].task for seq in range(4)] == ["math", "logic", "math", "logic"]
    assert none.queue.jobs[0].task == ""


@pytest.mark.parametrize(
    ("options", "taken", "waits"), [({}, [0, 1, 2, 3], 1), ({"quotas": None}, [0, 2, 4, 6], 0)], ids=["quotas", "none"]
)
def test_a_batch_waits_for_the_share_of_a_slow_task(options: dict[str, Any], taken: list[int], waits: int) -> None:
    two = bench(**options)
    two.queue.finish(0, 2, 4, 6, version=0)  # only of math
    two.queue.on_wait = lambda: two.queue.finish(1, 3, version=0)
    assert (seqs(two.source.take(0)), two.queue.waits) == (taken, waits)


def test_a_task_whose_groups_fail_makes_a_batch_uneven_and_never_waits_for_ever(decisions: list[str]) -> None:
    two = bench()
    two.queue.finish(0, 2, 4, 6, 7, version=0)
    two.queue.fail_for_good(1, 3, 5)
    two.queue.on_wait = lambda: two.queue.fail_for_good(*[seq for seq in two.queue.unclaimed() if seq % 2])
    assert seqs(two.source.take(0)) == [0, 2, 4, 7]
    assert two.logged["async/tasks_missing"] == [0]
    two.step_done(1)

    def logic_fails() -> None:
        two.queue.fail_for_good(*[seq for seq in two.queue.unclaimed() if seq % 2])
        two.queue.finish(*two.queue.unclaimed(), version=1)

    two.queue.on_wait = logic_fails
    assert tasks_of(two.source.take(1)) == {"math": 4}
    assert two.logged["async/tasks_missing"] == [0, 1]
    assert sum("no group of task 'logic'" in line for line in decisions) == 1


def test_only_when_all_groups_fail_does_the_run_end() -> None:
    two = bench()

    def fail_logic_only() -> None:
        two.queue.fail_for_good(*[seq for seq in two.queue.unclaimed() if seq % 2])
        two.queue.finish(*two.queue.unclaimed(), version=two.publisher.version or 0)

    two.queue.on_wait = fail_logic_only
    for version in range(8):
        assert len(two.source.take(version)) == 4
        two.step_done(version + 1)
    two.queue.on_wait = lambda: two.queue.fail_for_good(*two.queue.unclaimed())
    with pytest.raises(AllGroupsFailedError):
        two.source.take(8)


def test_in_order_the_order_of_issue_decides() -> None:
    two = bench(in_order=True)
    two.queue.fail_for_good(1)
    two.queue.finish(0, 2, 3, 4, 5, version=0)
    assert seqs(two.source.take(0)) == [0, 2, 3, 4]


def test_quotas_give_way_to_the_staleness_bound() -> None:
    """Groups 0 and 2 are as old as they may be. The quota of logic would leave one of them for a later round."""
    two = bench(B=2, K=1)
    two.queue.claim(0, 2)
    two.queue.fail_for_good(1, 3)
    two.queue.on_wait = lambda: two.queue.finish(4, 5, version=0)
    assert seqs(two.source.take(0)) == [4, 5]
    two.step_done(1)
    two.queue.finish(0, 2, version=0)
    two.queue.finish(*two.queue.unclaimed(), version=1)
    assert seqs(two.source.take(1)) == [0, 2]
    assert not two.history.left_out


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 3), st.sampled_from([(4, 2), (5, 2), (7, 3), (6, 6)]), st.floats(0.0, 0.6))
def test_chaos_of_workers_never_blocks_and_never_makes_a_group_too_old(
    seed: int, K: int, sizes: tuple[int, int], failing: float
) -> None:
    """Groups are claimed, finished and fail at random; the first task is the slow one and the one that fails."""
    B, count = sizes
    draw = random.Random(seed)
    run = bench(B=B, K=K, tasks=tuple("abcdef"[:count]))
    ages: dict[int, int] = {}

    def work() -> None:
        seen = run.publisher.version or 0
        assert run.queue.waits < 5000, "a batch waits for ever"
        for seq in run.queue.unclaimed()[: draw.randint(0, B)]:
            run.queue.claim(seq)
            ages[seq] = seen
        for seq in sorted(run.queue.claimed):
            slow = run.queue.jobs[seq].task == "a"
            if draw.random() < (0.1 if slow else 0.6):
                if slow and draw.random() < failing:
                    run.queue.fail_for_good(seq)
                else:
                    run.queue.finish(seq, version=ages[seq])

    run.queue.on_wait = work
    batches = []
    for version in range(12):
        run.queue.waits = 0
        batch = run.source.take(version)
        assert len(batch) == B
        assert all(0 <= version - group.policy_version <= K for group in batch)
        batches.append(batch)
        run.step_done(version + 1)
    assert not run.history.left_out
    used = [seq for batch in batches for seq in seqs(batch)]
    assert len(set(used)) == len(used)
    if not failing and K == 0:  # later, a quota gives way where a group would grow too old
        assert all(min(tasks_of(batch)[task] for task in "abcdef"[:count]) >= B // count for batch in batches)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30),
    st.integers(1, 8),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)),
)
def test_a_batch_is_the_quotas_and_then_the_oldest(
    groups: list[tuple[str, bool]], size: int, quotas: dict[str, int]
) -> None:
    quotas = quotas if sum(quotas.values()) <= size else {}
    task_of = {seq: task for seq, (task, _) in enumerate(groups)}
    finished = {seq for seq, (_, done) in enumerate(groups) if done}
    chosen = with_each_task(range(len(groups)), finished, task_of, quotas, size)
    there, of_finished = Counter(task_of.values()), Counter(task_of[seq] for seq in finished)
    short = {task: min(quota, there[task]) - of_finished[task] for task, quota in quotas.items()}
    if chosen is None:
        assert len(finished) < size or any(missing > 0 for missing in short.values())
        return
    assert len(chosen) == len(set(chosen)) == size and finished.issuperset(chosen)
    assert all(missing <= 0 for missing in short.values())
    for task in "abc":
        own = [seq for seq in chosen if task_of[seq] == task]
        assert own == sorted(finished & {seq for seq in task_of if task_of[seq] == task})[: len(own)]
        assert len(own) >= min(quotas.get(task, 0), there[task])


# --- What the start of a run says of the tasks in its rows -------------------------------------------------------


def rows(*of_each: tuple[str, str, int]) -> Dataset:
    found = [{"task": task, "data_source": source} for task, source, count in of_each for _ in range(count)]
    return Dataset.from_list(found)


MATH_AND_CODE = rows(("math", "math__a", 1200), ("code", "code__a", 2), ("math", "math__b", 3))
OF_EACH = "math 1,203 rows (2 sources), code 2 rows"


@pytest.mark.parametrize(
    ("dataset", "declared", "says"),
    [
        (MATH_AND_CODE, {}, OF_EACH),
        (MATH_AND_CODE.remove_columns("data_source"), {}, "math 1,203 rows, code 2 rows"),
        (
            MATH_AND_CODE,
            {"tasks_in_words": "a batch of 4 groups has 2 + 2; gradients: pcgrad", "gradients_besides": 2},
            f"{OF_EACH}; a batch of 4 groups has 2 + 2; gradients: pcgrad, 2 × 4.0 kB more memory",
        ),
        (rows(*((str(task), "", 1) for task in range(MOST_NAMED + 1))), {}, f"{MOST_NAMED + 1} tasks in 13 rows"),
        (MATH_AND_CODE.to_iterable_dataset(), {}, ""),
        (Dataset.from_list([{"prompt": "x"}]), {}, ""),
        (Dataset.from_list([{"task": {"id": 1}}]), {}, ""),
    ],
)
def test_the_line_of_the_tasks(dataset: Any, declared: dict[str, Any], says: str) -> None:
    model = nn.ModuleList([nn.Linear(1000, 1, bias=False), nn.Linear(9, 1).requires_grad_(False)])
    assert describe_tasks(SimpleNamespace(train_dataset=dataset, model=model, **declared)) == says  # type: ignore[arg-type]
