"""What the run measures about its rollouts: `async/*` metrics for each step, totals for the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, median

from async_grpo.records import RolloutGroup, Timings

CALLS, FAILURES = "tools/call_frequency", "tools/failure_frequency"  # TRL's: calls a completion, failures a call


class RolloutMetrics:
    """Counts what passes through the trainer. Times are seconds on this process's monotonic clock.

    Args:
        append: adds one value of one metric to TRL's own training metrics.
    """

    def __init__(self, append: Callable[[str, float], None]) -> None:
        self._append = append
        self._started = self._last_batch = time.monotonic()
        self._before: dict[str, int] = {}  # what a resumed run had done
        self.workers = 0  # alive
        self._last_wait_s = 0.0
        self._server_overhead_s = 0.0  # since the last batch
        self._spent_on_dropped: list[Timings] = []  # since the last batch
        self.rollouts = 0  # completions trained on
        self.groups = 0
        self.wait_s = 0.0
        self.overhead_s = 0.0  # of all processes together
        self.busy_s = 0.0  # of all workers together
        self.worker_s = 0.0  # alive workers x time
        self.staleness_sum = 0
        self.staleness_max = 0
        self.quarantined = 0
        self.dropped = 0

    def resumes(self, *, step: int, rollouts: int) -> None:
        """The run goes on at `step`, where it had been trained on so many rollouts."""
        self._before = {"resumed_from": step, "rollouts_before": rollouts}

    def training_begins(self) -> None:
        """The clock of the summary's shares and rates starts when the trainer could first use a rollout."""
        self._started = self._last_batch = time.monotonic()

    def waited(self, seconds: float, *, busy: float = 0.0) -> None:
        """The trainer waited for rollouts, `busy` seconds of it with the queue's files."""
        self.wait_s += seconds
        self._last_wait_s = seconds
        self._server_overhead_s += busy

    @contextmanager
    def server_is_busy(self) -> Iterator[None]:
        """The trainer's process handles queue, files and weights, and does not train."""
        started = time.monotonic()
        yield
        self._server_overhead_s += time.monotonic() - started

    def batch_taken(self, batch: Sequence[RolloutGroup], version: int) -> None:
        now = time.monotonic()
        elapsed = max(now - self._last_batch, 1e-9)
        self._last_batch = now
        staleness = [version - group.policy_version for group in batch]
        rollouts = sum(group.job.num_generations for group in batch)
        spent = [*self._spent_on_dropped, *(group.timings for group in batch)]
        busy = sum(times.adopt_s + times.generate_s + times.score_s for times in spent)
        overhead = self._server_overhead_s + sum(times.adopt_s + times.queue_s for times in spent)
        self._server_overhead_s = 0.0
        self._spent_on_dropped.clear()
        self.rollouts += rollouts
        self.groups += len(batch)
        self.busy_s += busy
        self.overhead_s += overhead
        self.worker_s += self.workers * elapsed
        self.staleness_sum += sum(staleness)
        self.staleness_max = max(self.staleness_max, *staleness)

        self._append("async/staleness_mean", sum(staleness) / len(staleness))
        self._append("async/staleness_max", max(staleness))
        for half, versions in staleness_by_length(batch, version).items():
            self._append(f"async/staleness_{half}", mean(versions))
        self._append("async/rollouts_per_second", rollouts / elapsed)
        self._append("async/trainer_wait_fraction", min(1.0, self._last_wait_s / elapsed))
        self._append("async/overhead_fraction", min(1.0, overhead / ((1 + self.workers) * elapsed)))
        if self.workers:
            self._append("async/worker_busy_fraction", min(1.0, busy / (self.workers * elapsed)))

    def tasks_missing(self, count: int | None) -> None:
        """The batch has no group of so many tasks. None: it need not have all."""
        if count is not None:
            self._append("async/tasks_missing", count)

    def group_dropped(self, group: RolloutGroup) -> None:
        """A group that is not used: it came too late for the staleness bound, or all its rewards are equal."""
        self.dropped += 1
        self._spent_on_dropped.append(group.timings)
        self._append("async/dropped_length", float(group.completion_lengths.mean()))

    def totals(self) -> dict[str, float | int]:
        """The summary's figures about rollouts, under the names of `summary.json`."""
        wall = max(time.monotonic() - self._started, 1e-9)
        return {
            "rollouts": self.rollouts,
            "rollouts_per_second": round(self.rollouts / wall, 2),
            "staleness_mean": round(self.staleness_sum / max(1, self.groups), 3),
            "staleness_max": self.staleness_max,
            "trainer_wait_fraction": round(min(1.0, self.wait_s / wall), 4),
            "worker_busy_fraction": round(min(1.0, self.busy_s / self.worker_s), 4) if self.worker_s else 0.0,
            "overhead_fraction": round(min(1.0, self.overhead_s / (wall + self.worker_s)), 4),
            "jobs_quarantined": self.quarantined,
            "groups_dropped": self.dropped,
            **self._before,
        }


def logged_by_workers(batch: Sequence[RolloutGroup]) -> Iterator[tuple[str, float]]:
    """What workers counted and reward functions logged: TRL takes the mean of a metric's values.

    Failures are a share of the calls, of which groups have different numbers.
    """
    for group in batch:
        for name, values in group.metrics.items():
            yield from ((name, value) for value in values if name != FAILURES)
    counted = [(mean(group.metrics[CALLS]) * group.job.num_generations, group) for group in batch if _calls(group)]
    if any(FAILURES in group.metrics for group in batch):
        calls = sum(count for count, _ in counted)
        yield FAILURES, sum(count * mean(group.metrics[FAILURES]) for count, group in counted) / calls if calls else 0.0


def added_by_workers(batch: Sequence[RolloutGroup]) -> Iterator[tuple[str, str, list[float]]]:
    """What the user's code in workers added to the trainer's `_metrics`: mode, name, values."""
    for group in batch:
        for key, values in group.added_metrics.items():
            mode, _, name = key.partition("/")
            if mode not in ("train", "eval"):
                raise ValueError(f"{mode!r} is no mode of TRL's metrics")
            yield mode, name, values


def _calls(group: RolloutGroup) -> bool:
    return bool(group.metrics.get(CALLS) and group.metrics.get(FAILURES))


def staleness_by_length(batch: Sequence[RolloutGroup], version: int) -> dict[str, list[int]]:
    """Staleness of each completion of the batch that is longer than the median one (`long`), and of the others.

    Empty where all are equally long.
    """
    lengths = [length for group in batch for length in group.completion_lengths.tolist()]
    ages = [version - group.policy_version for group in batch for _ in group.completion_lengths]
    halves: dict[str, list[int]] = {"short": [], "long": []}
    for is_long, age in zip(longer_half(lengths), ages, strict=True):
        halves["long" if is_long else "short"].append(age)
    return halves if halves["long"] else {}


def longer_half(lengths: Sequence[int]) -> list[bool]:
    """Which completions are longer than the median one. `[3, 9, 5, 7]` -> `[False, True, False, True]`."""
    middle = median(lengths) if lengths else 0
    return [length > middle for length in lengths]
