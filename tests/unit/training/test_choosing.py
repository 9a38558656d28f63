"""Which rows `--choose-prompts` takes, what it learns of their rewards, and what a resumed run knows again."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from async_grpo.archive.rollout_state import FILE_NAME, RolloutState, RowCounts, read, write
from async_grpo.errors import RunDirError, UsageError
from async_grpo.records import RolloutGroup
from async_grpo.training import choosing
from async_grpo.training.choosing import DECAY, FLOOR, PromptChooser, counted_in, drawn_chance, refuse_choosing
from kit.groups import RUN, make_group, make_job
from kit.training_fakes import Bench, schedule

G = 4


def group(*rewards: float, seq: int = 0) -> RolloutGroup:
    return make_group(make_job(seq, num_generations=len(rewards)), rewards=np.array([rewards], np.float32).T)


def learned(*groups: Sequence[float]) -> RowCounts:
    counts = RowCounts(7)
    for rewards in groups:
        counts = counted_in(counts, group(*rewards), varied=len(set(rewards)) > 1)
    return counts


def test_completions_are_counted_while_rewards_are_0_or_1_and_older_ones_count_less() -> None:
    assert learned([1, 1, 0, 0]) == (7, 2.0, 2.0, False)
    assert learned([1, 1, 0, 0], [0, 0, 0, 1]) == (7, 2 * DECAY + 1, 2 * DECAY + 3, False)


def test_groups_are_counted_from_the_first_other_reward_on() -> None:
    assert learned([0, 0, 0, 0], [0.5, 0.5, 0, 1]) == (7, 1.0, 0.0, True)
    assert learned([0.5, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]) == (7, 1.0 * DECAY**2 + 1, DECAY, True)
    assert counted_in(RowCounts(7), group(1, 1, 1, 1), varied=True).graded, "functions disagree, the sums do not"
    assert counted_in(RowCounts(7), group(1, 1, 1, float("nan")), varied=False).graded


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_the_chance_that_rewards_differ(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: of four completions with p = 1/4, 1 - 1/256 - 81/256 = 174/256."""
    monkeypatch.setattr(choosing, "PRIOR", 1e-9 if p in (0, 1) else 0.25)
    asked: list[tuple[float, float]] = []
    fixed = SimpleNamespace(betavariate=lambda a, b: asked.append((a, b)) or p)
    assert drawn_chance(RowCounts(0, 2.0, 6.0), 4, fixed) == {0.0: 0, 0.25: 174 / 256, 1.0: 0}[p]
    assert drawn_chance(RowCounts(0, 2.0, 6.0, graded=True), 4, fixed) == p
    assert asked == [(choosing.PRIOR + 2, choosing.PRIOR + 6)] * 2


def test_what_one_group_says() -> None:
    """In the mean over p: 1 - B(a + G, b) / B(a, b) - B(a, b + G) / B(a, b), a and b the counts and the prior."""
    randomness = random.Random(0)
    means = [
        np.mean([drawn_chance(learned(rewards), 8, randomness) for _ in range(20_000)])
        for rewards in ([0] * 8, [1] * 8, [1, 0] * 4)
    ]
    assert means == pytest.approx([0.156, 0.156, 0.97], abs=0.02)


class Rows:
    """A dataset of as many rows as it has tasks, whose sampler goes through it in turn."""

    def __init__(self, folder: Path, tasks: Sequence[Any] = ("",) * 10) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / "chosen.jsonl"
        self.metrics: dict[str, list[float]] = defaultdict(list)
        self.dataset = Dataset.from_dict({"task": tasks})

    def chooser(self, **options: Any) -> PromptChooser:
        trainer = SimpleNamespace(
            train_dataset=self.dataset,
            args=SimpleNamespace(seed=3, generation_batch_size=G, steps_per_generation=1),
            num_generations=G,
            num_iterations=1,
            reward_weights=np.ones(1),
            scale_rewards="group",
            multi_objective_aggregation="sum_then_normalize",
            _metrics={"train": self.metrics},
            _get_train_sampler=lambda dataset: np.repeat(np.arange(len(dataset)), G).tolist(),
        )
        return PromptChooser(trainer, self.path, **options)


IMPOSSIBLE = 6  # rows below it are


def rewards_of(row: int) -> list[float]:
    return [0, 0, 0, 0] if row < IMPOSSIBLE else [1, 0, 0, 1]


def use(chooser: PromptChooser, rows: Iterator[int], jobs: int, *, at: int = 0) -> list[int]:
    """Take jobs `at` and after, one by one, and let the chooser learn of each."""
    taken = list[int]()
    for seq in range(at, at + jobs):
        taken.append(next(rows))
        chooser.learn([group(*rewards_of(taken[-1]), seq=seq)])
    return taken


def test_rows_that_teach_nothing_are_skipped_but_never_for_good_and_none_comes_twice_in_a_pass(tmp_path: Path) -> None:
    data = Rows(tmp_path)
    chooser = data.chooser()
    taken = use(chooser, chooser.rows(), 2000)
    late = Counter(taken[1000:])
    assert sum(late[row] for row in range(IMPOSSIBLE)) < 250 < 6 * 1000 / 10
    assert all(late[row] for row in range(10)), "there is a floor"
    expected = 6 * FLOOR / (6 * FLOOR + 4 * 0.9)
    assert sum(late[row] for row in range(IMPOSSIBLE)) / 1000 == pytest.approx(expected, abs=0.06)
    lines = [json.loads(line) for line in data.path.read_text().splitlines()]
    assert [line["row"] for line in lines] == taken
    places = accumulate(1 + line["skipped"] for line in lines)
    assert [(place - 1) % 10 for place in places] == taken, "the order is the sampler's"
    assert data.metrics["async/rows_skipped"] == [line["skipped"] for line in lines]


def test_the_first_pass_takes_every_row(tmp_path: Path) -> None:
    chooser = Rows(tmp_path).chooser()
    assert use(chooser, chooser.rows(), 10) == list(range(10))


def test_each_job_has_the_task_that_the_sampler_gives_it(tmp_path: Path) -> None:
    tasks = ["sums", "words", "words", None, "words"] * 4
    data = Rows(tmp_path, tasks)
    chooser = data.chooser()
    taken = use(chooser, chooser.rows(), 103)
    chooser.close()
    again = data.chooser(resume_from=state(chooser, next_seq=103, consumed=103))
    taken += use(again, again.rows(103), 97, at=103)
    assert [tasks[row] for row in taken] == tasks * 10
    words = [row for row in taken if tasks[row] == "words"]
    assert words[12:] != words[:-12] and {*words} == {row for row in range(20) if tasks[row] == "words"}


def state(chooser: PromptChooser, *, next_seq: int, consumed: int) -> RolloutState:
    numbers = {"step": 1, "next_seq": next_seq, "rounds": 1, "unusable": [], "consumed_below": consumed, "consumed": []}
    return RolloutState(run_id=RUN, row_counts=chooser.counts(), **numbers)


def test_a_resumed_run_gives_each_job_the_row_that_it_had_and_knows_what_the_checkpoint_knew(tmp_path: Path) -> None:
    """Jobs 40 to 43 were issued and not used at the checkpoint, jobs 44 to 49 were issued after it."""
    data = Rows(tmp_path)
    chooser = data.chooser()
    rows = chooser.rows()
    use(chooser, rows, 40)
    issued = list(islice(rows, 4))
    write(tmp_path, state(chooser, next_seq=44, consumed=40))
    issued += islice(rows, 6)
    chooser.close()
    used = read(tmp_path / FILE_NAME)
    again = data.chooser(resume_from=used)
    assert list(islice(again.rows(40), 10)) == issued
    assert again.counts() == used.row_counts == list(map(RowCounts._make, used.row_counts))
    assert {counts.row for counts in used.row_counts} <= set(range(10)) and len(used.row_counts) > 4


@pytest.mark.parametrize("lost", range(0, 30, 7))
def test_in_order_a_killed_run_chooses_the_same_rows_again(lost: int, tmp_path: Path) -> None:
    """What the checkpoint needs of the file survives, and `lost` lines of the rest."""
    undisturbed = Rows(tmp_path / "one")
    chooser = undisturbed.chooser(ahead=12)
    rows = chooser.rows()
    use(chooser, rows, 40)
    saved = state(chooser, next_seq=44, consumed=40)
    expected = use(chooser, rows, 60, at=40)
    killed = Rows(tmp_path / "two")
    lines = undisturbed.path.read_text().splitlines(keepends=True)
    killed.path.write_text("".join(lines[: 52 + lost]))
    resumed = killed.chooser(ahead=12, resume_from=saved)
    assert use(resumed, resumed.rows(40), 60, at=40) == expected
    assert resumed.counts() == chooser.counts()


def test_in_order_rows_do_not_depend_on_when_jobs_are_issued(tmp_path: Path) -> None:
    """The one issues a job as soon as a group is used; the other 8 at a time, and some only when they are asked for."""
    found = []
    for name, step in (("soon", 1), ("late", 8)):
        chooser = Rows(tmp_path / name).chooser(ahead=8)
        rows, taken = chooser.rows(), list[int]()
        for seq in range(64):
            if seq % step == 0:
                taken += islice(rows, step)
            chooser.learn([group(*rewards_of(taken[seq]), seq=seq)])
        found.append(taken)
    assert found[0] == found[1]


@pytest.mark.parametrize("damage", ["shorter", "a line is gone", "fewer rows"])
def test_a_file_of_choices_that_does_not_fit_is_refused(damage: str, tmp_path: Path) -> None:
    data = Rows(tmp_path)
    chooser = data.chooser()
    use(chooser, chooser.rows(), 20)
    saved = state(chooser, next_seq=20, consumed=20)
    lines = data.path.read_text().splitlines(keepends=True)
    if damage == "shorter":
        data.path.write_text("".join(lines[:19]))
    elif damage == "a line is gone":
        data.path.write_text("".join(lines[:5] + lines[6:] + lines[:1]))
    else:
        data.dataset = data.dataset.select(range(5))
    with pytest.raises(RunDirError, match="has the row of each job"):
        data.chooser(resume_from=saved)


def test_the_source_tells_of_groups_that_are_used_and_of_those_that_are_left_out(tmp_path: Path) -> None:
    chooser = Rows(tmp_path).chooser()
    list(islice(chooser.rows(), 6))
    bench = Bench(
        schedule(B=2, K=1), learn=chooser.learn, row_counts=chooser.counts, is_uniform=lambda one: one.job.seq == 0
    )
    bench.source.advance(0)
    bench.queue.finish(0, 1, 2, version=0)
    bench.source.take(0)
    known = bench.source.state_at(0, passes_done=0).row_counts
    assert known == chooser.counts() and sum(one.failures for one in known) == 6, "three groups of two completions"


def test_what_it_cannot_choose_from_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Dataset.from_dict({"prompt": ["a"]})
    monkeypatch.setattr(choosing, "own_dataloader", lambda trainer: None)
    refuse_choosing(SimpleNamespace(train_dataset=rows))
    with pytest.raises(UsageError, match=r"which a stream hides\. Leave one of them out"):
        refuse_choosing(SimpleNamespace(train_dataset=rows.to_iterable_dataset()))
    monkeypatch.setattr(choosing, "own_dataloader", lambda trainer: "get_train_dataloader")
    with pytest.raises(UsageError, match=r"which get_train_dataloader hides\. Leave one of them out"):
        refuse_choosing(SimpleNamespace(train_dataset=rows))
    monkeypatch.setattr(choosing, "compares_groups", lambda trainer: False)
    with pytest.raises(UsageError, match="SimpleNamespace learns from groups of equal rewards too"):
        refuse_choosing(SimpleNamespace(train_dataset=rows))
