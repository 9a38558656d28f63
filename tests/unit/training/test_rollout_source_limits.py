"""Groups that fail: what the trainer gets then, also at the end of a run."""

from __future__ import annotations

import pytest

from async_grpo.errors import AllGroupsFailedError
from kit.training_fakes import Bench, begun, schedule, seqs


def test_when_nothing_but_failures_comes_back_the_traceback_is_in_the_error() -> None:
    bench = begun(schedule(B=4, K=4))
    reason = "Traceback (most recent call last):\n  File 'rewards.py', line 3\nValueError: no number"

    bench.queue.on_wait = lambda: bench.queue.fail_for_good(*bench.queue.unclaimed(), reason=reason)
    with pytest.raises(AllGroupsFailedError, match=r"prompt groups all failed(.|\n)*rewards\.py(.|\n)*no number"):
        bench.source.take(0)


@pytest.mark.parametrize(("B", "finished", "ends_at"), [(1, [], None), (2, [0], 1)], ids=["tiny batches", "at the end"])
def test_one_poisoned_prompt_is_replaced(B: int, finished: list[int], ends_at: int | None) -> None:
    bench = Bench(schedule(B=B, K=0))
    bench.source.ends_at = ends_at
    bench.source.advance(0)
    bench.queue.finish(*finished, version=0)
    bench.queue.fail_for_good(B - 1)
    bench.queue.on_wait = lambda: bench.queue.finish(B, version=0)
    assert seqs(bench.source.take(0)) == [*finished, B]


def test_some_failures_between_successes_do_not_end_the_run() -> None:
    bench = Bench(schedule(B=4, K=0))
    for version in range(20):
        bench.source.advance(version)
        bench.queue.fail_for_good(bench.queue.unclaimed()[0])
        bench.queue.on_wait = lambda version=version: bench.queue.finish(*bench.queue.unclaimed(), version=version)
        assert len(bench.source.take(version)) == 4
        bench.step_done(version + 1)
    assert bench.metrics.quarantined == 20
