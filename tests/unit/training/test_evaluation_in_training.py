"""What training does around an evaluation that holds the published version back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from datasets import Dataset

from async_grpo.errors import WaitTimeoutError
from async_grpo.training import rollout_source
from async_grpo.training.prompts import evaluation_rows
from kit.training_fakes import Bench, FakePublisher, begun, schedule, seqs


class HoldingPublisher(FakePublisher):
    """Publishes what is due unless it is held."""

    due: int | None = None

    def retry(self) -> None:
        if self.due is not None and self.held_at is None:
            self.version, self.due = self.due, None


class FakeEvaluations:
    """An evaluation that answers a problem at each look; after the last one its version is no longer held."""

    def __init__(self, publisher: FakePublisher, problems: int) -> None:
        self.done, self._publisher, self._problems = 0, publisher, problems
        self.hangs = False

    @property
    def busy(self) -> bool:
        return self.done < self._problems

    def describe(self) -> str:
        return f"an evaluation ({self.done} problems done)"

    def look(self) -> None:
        self.done += self.busy and not self.hangs
        if not self.busy:
            self._publisher.held_at = None


def evaluating(problems: int, **options: Any) -> tuple[Bench, FakeEvaluations]:
    bench = begun(schedule(B=1, K=0), **options)
    evaluations = bench.source._evaluations = FakeEvaluations(bench.publisher, problems)
    return bench, evaluations


def test_when_an_evaluation_ends_what_it_held_back_is_there_before_jobs_ask_for_it() -> None:
    bench = Bench(schedule(B=2, K=1))
    publisher = bench.source._publisher = HoldingPublisher()
    bench.source.advance(0)
    bench.queue.finish(0, 1, version=0)
    assert seqs(bench.source.take(0)) == [0, 1]
    publisher.held_at, publisher.due = 0, 1
    bench.source.trained()
    bench.source.advance(1)
    bench.queue.finish(2, 3, version=0)
    bench.source._evaluations = FakeEvaluations(publisher, problems=1)
    assert seqs(bench.source.take(1)) == [2, 3]
    assert bench.queue.jobs[4].min_version == 1
    assert publisher.version == 1, "a worker that has the job would wait for it as long as the optimizer step takes"


def test_while_a_version_is_held_nothing_is_issued_that_it_may_not_answer() -> None:
    bench = Bench(schedule(B=1, K=2))
    bench.publisher.held_at = 0
    for version in range(3):
        bench.source.advance(version)
        bench.queue.finish(*bench.queue.unclaimed(), version=0)
        assert len(bench.source.take(version)) == 1
        bench.source.trained()
    bench.source.advance(3)
    assert bench.queue.submitted == [0, 1, 2], "the bound of two versions admits three rounds of version 0"
    bench.publisher.held_at, bench.publisher.version = None, 3
    bench.source.advance(3)
    assert bench.queue.jobs[3].min_version == 1


def test_training_waits_for_the_end_of_an_evaluation_and_goes_on() -> None:
    bench, evaluations = evaluating(problems=8)
    bench.publisher.held_at = 0
    bench.queue.finish(0, version=0)
    assert seqs(bench.source.take(0)) == [0]
    bench.source.trained()
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.unclaimed(), version=1)
    assert seqs(bench.source.take(1)) == [1]
    assert not evaluations.busy


def test_an_evaluation_that_goes_on_is_progress_and_one_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now, progress = [0.0], Mock()
    monkeypatch.setattr(rollout_source, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(rollout_source, "activity", SimpleNamespace(progress=progress))
    bench, evaluations = evaluating(problems=10, max_wait_s=15.0)
    bench.queue.on_wait = lambda: now.__setitem__(0, now[0] + 10)
    assert bench.source.finish_evaluation(0)
    assert progress.called, "else training that waits for it would be told to be stalled"
    evaluations.done, evaluations.hangs = 3, True
    with pytest.raises(WaitTimeoutError, match=r"waiting for an evaluation \(3 problems done\)"):
        bench.source.finish_evaluation(0)
    bench.queue.alive = 0
    with pytest.raises(WaitTimeoutError, match="no worker is alive: start one"):
        bench.source.finish_evaluation(0)


def test_a_stop_ends_the_wait_for_an_evaluation() -> None:
    bench, _ = evaluating(problems=1000)
    bench.stopping = True
    assert not bench.source.finish_evaluation(0)


def test_jobs_that_no_step_would_use_are_not_issued_unless_training_goes_on() -> None:
    """As a callback can have it that raises `max_steps`."""
    bench = Bench(schedule(B=2, K=4))
    bench.source.ends_at = 1
    bench.source.advance(0)
    assert bench.queue.submitted == [0, 1]
    bench.use(0, 1, version=0)
    assert bench.queue.submitted == [0, 1]
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.unclaimed()[:2], version=1)
    assert seqs(bench.source.take(1)) == [2, 3]


@pytest.mark.parametrize(("held_at", "under_way"), [(0, 4), (None, 6)])
def test_waiting_for_an_evaluation_makes_no_rollouts_staler(held_at: int | None, under_way: int) -> None:
    """More are under way only where the workers had nothing to do."""
    bench = begun(schedule(B=2, K=4))
    bench.queue.claim(*bench.queue.unclaimed())
    bench.publisher.held_at = held_at
    bench.queue.on_wait = lambda: bench.queue.finish(0, 1, version=0)
    bench.source.take(0)
    assert bench.source._lookahead.groups == under_way


# --- Which rows an evaluation asks, and for which task each counts -----------------------------------------------


def problems(given: Any) -> list[tuple[dict[str, Any], str]]:
    trainer: Any = SimpleNamespace(eval_dataset=given, _remove_unused_columns=lambda data, **_: data)
    return evaluation_rows(trainer)


def test_a_column_task_stays_what_it_is_for_the_reward_functions() -> None:
    rows = Dataset.from_dict({"prompt": ["1+1=", "x"], "task": ["sums", "letters"]})
    plain = Dataset.from_dict({"prompt": ["2"]})
    assert [task for _, task in problems(rows)] == ["sums", "letters"]
    assert problems({"old": rows, "new": plain}) == [
        ({"prompt": "1+1=", "task": "sums"}, "old"),
        ({"prompt": "x", "task": "letters"}, "old"),
        ({"prompt": "2"}, "new"),
    ]
