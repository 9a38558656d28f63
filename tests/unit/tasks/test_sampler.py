"""The order of rows: as TRL's sampler repeats them, with each task in every batch."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parquet_files import parquet, row

from async_grpo.errors import UsageError
from async_grpo.tasks import load, sampled, within
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


# --- Which of the rows are used ----------------------------------------------------------------------------------


class Words:
    """A tokenizer with one token a word, whose template adds two."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[str]]]:
        return {"input_ids": [text.split() for text in texts]}

    def apply_chat_template(self, prompts: list[Any], *, tokenize: bool, add_generation_prompt: bool) -> list[str]:
        assert not tokenize and add_generation_prompt
        return [f"<user> {prompt[0]['content']} <assistant>" for prompt in prompts]


@pytest.mark.parametrize(("templated", "longest"), [(False, 3), (True, 5)])
def test_prompts_that_are_too_long_are_refused_or_left_out(
    tmp_path: Path, templated: bool, longest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["one two three", "one two three four", "one"]
    dataset = load(parquet(tmp_path / "a.parquet", *(row(prompt=it, apply_chat_template=templated) for it in texts)))
    assert within(dataset, Words(), longest + 1) is dataset
    with pytest.raises(UsageError, match=rf"row 2 of the data \(math__sums\) has {longest + 1} tokens, and at most"):
        within(dataset, Words(), longest)
    assert within(dataset, Words(), longest, drop=True)["extra_info"] == dataset.select([0, 2])["extra_info"]
    assert len(within(dataset, Words(), longest, drop=True)) == 2
    assert f"1 of 3 rows have over {longest} tokens, and are left out" in capsys.readouterr().out
    with pytest.raises(UsageError, match="Every prompt has over 0 tokens"):
        within(dataset, Words(), 0, drop=True)


def test_a_sample_has_of_each_task_its_share(tmp_path: Path) -> None:
    files = {
        "math": parquet(tmp_path / "m.parquet", *(row(prompt=f"{number}") for number in range(30))),
        "logic": parquet(tmp_path / "l.parquet", *(row(prompt=f"{number}") for number in range(10))),
        "code": parquet(tmp_path / "c.parquet"),
    }
    tasks = load(files, separate=True)
    some = sampled(tasks, 20, seed=1)
    assert {task: len(own) for task, own in some.items()} == {"math": 14, "logic": 4, "code": 1}
    assert some["math"]["prompt"] == sampled(tasks, 20, seed=1)["math"]["prompt"] != tasks["math"]["prompt"][:14]
    assert sampled(tasks, 41, seed=1) == tasks
