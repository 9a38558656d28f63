"""Groups that fail, versions that are held for an evaluation, and the end of a run: what the trainer gets then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from async_grpo.errors import AllGroupsFailedError, WaitTimeoutError
from async_grpo.training import rollout_source
from kit.training_fakes import Bench, schedule, seqs


def test_when_nothing_but_failures_comes_back_the_traceback_is_in_the_error() -> None:
    bench = Bench(schedule(B=4, K=4))
    bench.source.advance(0)
    reason = "Traceback (most recent call last):\n  File 'rewards.py', line 3\nValueError: no number"

    def everything_fails() -> None:
        bench.queue.fail_for_good(*bench.queue.unclaimed(), reason=reason)

    bench.queue.on_wait = everything_fails
    with pytest.raises(AllGroupsFailedError, match=r"prompt groups all failed(.|\n)*rewards\.py(.|\n)*no number"):
        bench.source.take(0)


def test_one_poisoned_prompt_does_not_end_a_run_of_tiny_batches() -> None:
    bench = Bench(schedule(B=1, K=0))
    bench.source.advance(0)
    bench.queue.fail_for_good(0)
    bench.queue.on_wait = lambda: bench.queue.finish(1, version=0)
    assert seqs(bench.source.take(0)) == [1]


def test_some_failures_between_successes_do_not_end_the_run() -> None:
    bench = Bench(schedule(B=4, K=0))
    for version in range(20):
        bench.source.advance(version)
        bench.queue.fail_for_good(bench.queue.unclaimed()[0])
        bench.queue.on_wait = lambda version=version: bench.queue.finish(*bench.queue.unclaimed(), version=version)
        assert len(bench.source.take(version)) == 4
        bench.step_done(version + 1)
    assert bench.metrics.quarantined == 20


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
    evaluations = FakeEvaluations(problems=8)
    bench = Bench(schedule(B=1, K=0), evaluations=evaluations)
    evaluations.bench, bench.publisher.held_at = bench, 0
    bench.source.advance(0)
    bench.queue.finish(0, version=0)
    assert seqs(bench.source.take(0)) == [0]
    bench.source.trained()
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.unclaimed(), version=1)
    assert seqs(bench.source.take(1)) == [1]
    assert not evaluations.busy


def test_an_evaluation_that_goes_on_is_no_reason_to_give_up_and_one_that_hangs_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(rollout_source, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def ten_seconds() -> None:
        now[0] += 10

    for hangs in (False, True):
        evaluations = FakeEvaluations(problems=10)
        evaluations.hangs = hangs
        bench = Bench(schedule(B=1, K=0), evaluations=evaluations, max_wait_s=15.0)
        evaluations.bench, bench.queue.on_wait = bench, ten_seconds
        if not hangs:
            assert bench.source.finish_evaluation(0)
            continue
        with pytest.raises(WaitTimeoutError, match=r"waiting for an evaluation \(0 problems done\)"):
            bench.source.finish_evaluation(0)


def test_a_stop_ends_the_wait_for_an_evaluation() -> None:
    evaluations = FakeEvaluations(problems=1000)
    bench = Bench(schedule(B=1, K=0), evaluations=evaluations)
    evaluations.bench, bench.stopping = bench, True
    assert not bench.source.finish_evaluation(0)


def test_a_group_that_fails_for_good_at_the_end_is_replaced() -> None:
    bench = Bench(schedule(B=2, K=0))
    bench.source.ends_at = 1
    bench.source.advance(0)
    bench.queue.fail_for_good(1)
    bench.queue.finish(0, version=0)
    bench.queue.on_wait = lambda: bench.queue.finish(2, version=0)
    assert seqs(bench.source.take(0)) == [0, 2]


class FakeEvaluations:
    """An evaluation that answers a problem at each look; after the last one its version is no longer held."""

    def __init__(self, problems: int) -> None:
        self.bench: Bench
        self.done = self.looks = 0
        self.hangs = False
        self._problems = problems

    @property
    def busy(self) -> bool:
        return self.done < self._problems

    def describe(self) -> str:
        return f"an evaluation ({self.done} problems done)"

    def look(self) -> None:
        self.looks += 1
        if self.busy and not self.hangs:
            self.done += 1
        if not self.busy:
            self.bench.publisher.held_at = None
