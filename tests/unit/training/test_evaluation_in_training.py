"""What training does around an evaluation that holds the published version back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from async_grpo.errors import WaitTimeoutError
from async_grpo.training import rollout_source
from kit.training_fakes import Bench, FakePublisher, schedule, seqs


class HoldingPublisher(FakePublisher):
    """Publishes what is due unless it is held."""

    due: int | None = None

    def retry(self) -> None:
        if self.due is not None and self.held_at is None:
            self.version, self.due = self.due, None


class EndingEvaluation:
    """Ends at the next look."""

    busy, done = True, 0
    describe = staticmethod(lambda: "an evaluation")

    def __init__(self, publisher: FakePublisher) -> None:
        self._publisher = publisher

    def look(self) -> None:
        self._publisher.held_at, self.busy = None, False
        self.done += 1


def test_when_an_evaluation_ends_what_it_held_back_is_there_before_jobs_ask_for_it() -> None:
    bench = Bench(schedule(B=2, K=1))
    publisher = bench.source._publisher = HoldingPublisher()  # type: ignore[assignment]
    bench.source.advance(0)
    bench.queue.finish(0, 1, version=0)
    assert seqs(bench.source.take(0)) == [0, 1]
    publisher.held_at = 0
    publisher.due = 1
    bench.source.trained()
    bench.source.advance(1)
    bench.queue.finish(2, 3, version=0)
    bench.source._evaluations = EndingEvaluation(publisher)  # type: ignore[assignment]
    assert seqs(bench.source.take(1)) == [2, 3]
    assert bench.queue.jobs[4].min_version == 1
    assert publisher.version == 1, "a worker that has the job would wait for it as long as the optimizer step takes"


def test_training_that_waits_for_an_evaluation_is_not_stalled_while_problems_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = list[int]()
    monkeypatch.setattr(rollout_source, "activity", SimpleNamespace(progress=lambda: progress.append(1)))
    bench = Bench(schedule(B=2, K=1))
    bench.queue.on_wait = lambda: None
    bench.source._evaluations = EndingEvaluation(bench.publisher)  # type: ignore[assignment]
    assert bench.source.finish_evaluation(1)
    assert progress


def test_an_evaluation_that_never_ends_is_named_in_the_error() -> None:
    bench = Bench(schedule(B=2, K=1), max_wait_s=0)
    bench.queue.on_wait = lambda: None
    evaluation = EndingEvaluation(bench.publisher)
    evaluation.look = lambda: None  # type: ignore[method-assign]
    bench.source._evaluations = evaluation  # type: ignore[assignment]
    with pytest.raises(WaitTimeoutError, match="waiting for an evaluation"):
        bench.source.finish_evaluation(1)
    bench.queue.alive = 0
    with pytest.raises(WaitTimeoutError, match="no worker is alive: start one"):
        bench.source.finish_evaluation(1)


def test_jobs_that_no_step_would_use_are_not_issued_unless_training_goes_on() -> None:
    """As a callback can have it that raises `max_steps`."""
    bench = Bench(schedule(B=2, K=4))
    bench.source.ends_at = 1
    bench.source.advance(0)
    assert bench.queue.submitted == [0, 1]
    bench.queue.finish(0, 1, version=0)
    bench.source.take(0)
    bench.step_done(1)
    assert bench.queue.submitted == [0, 1]
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.unclaimed()[:2], version=1)
    assert seqs(bench.source.take(1)) == [2, 3]


@pytest.mark.parametrize(("held_at", "under_way"), [(0, 4), (None, 6)])
def test_waiting_for_an_evaluation_makes_no_rollouts_staler(held_at: int | None, under_way: int) -> None:
    """More are under way only where the workers had nothing to do."""
    bench = Bench(schedule(B=2, K=4))
    bench.source.advance(0)
    for seq in bench.queue.unclaimed():
        bench.queue.claim(seq)
    bench.publisher.held_at = held_at
    bench.queue.on_wait = lambda: bench.queue.finish(0, 1, version=0)
    bench.source.take(0)
    assert bench.source._lookahead.groups == under_way
