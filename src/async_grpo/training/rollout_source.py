"""Keeps the queue filled as far ahead as the schedule admits, and hands the trainer one batch of groups at a time."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress

from async_grpo.archive.history import ConsumptionRecord, UsedBatch
from async_grpo.archive.rollout_state import RolloutState, RowCounts, Sampled, pack_consumed
from async_grpo.errors import AllGroupsFailedError, DiskFullError, WaitTimeoutError
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.queue import ServerQueue
from async_grpo.records import RolloutGroup
from async_grpo.telemetry.activity import activity
from async_grpo.telemetry.waiting import Reminder
from async_grpo.training.companions import Evaluations
from async_grpo.training.job_issuer import JobIssuer, SeenOfTrainer
from async_grpo.training.rollout_metrics import RolloutMetrics
from async_grpo.training.schedule import Schedule
from async_grpo.training.weight_publisher import WeightPublisher

Quotas = Mapping[str, int]  # groups of each task in every batch; their sum is at most the size of a batch
UNIFORM_ROUNDS = 10  # rounds of groups with equal rewards in a row; then train on them anyway
WAKE_S = 0.5  # a wait on the queue looks at everything else at least this often
MIN_FAILURES = 8  # in a row that end a run: a whole small batch may fail by chance


class StopTraining(Exception):  # no error: the run was asked to end
    """Raised out of a wait for rollouts when the run was asked to stop."""


class _Patience:
    """Is over when `progress` has not changed for so many seconds."""

    def __init__(self, seconds: float, progress: Callable[[], int]) -> None:
        self._seconds, self._progress = seconds, progress
        self._seen, self._since = progress(), time.monotonic()

    def is_over(self) -> bool:
        now, seen = time.monotonic(), self._progress()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now > self._since + self._seconds


class RolloutSource:
    """The trainer's view of the workers: `advance(version)` issues jobs, `take(version)` returns a batch.

    Args:
        should_stop: whether the run was asked to end.
        in_order: use groups exactly in the order of issue, whichever worker is faster, as far ahead as the bound admits
            (not only as far as `Lookahead` says).
        quotas: groups of each task that a batch waits for; None: of any. In order, the order of issue decides.
        is_uniform: a group for which it is true teaches nothing, and is replaced by a new one.
        evaluations: looked after at every look at the queue.
        learn: is told of each group that was scored, when it is taken or left out.
        row_counts: what is known of dataset rows by them, for the checkpoint.
        max_wait_s: how long one batch may take; no worker, or workers that deliver nothing, end the run then.
        finish_s: how long `finish_open` goes on after the run was asked to end.
        way_to_workers: what to do where none is alive.
    """

    def __init__(
        self,
        *,
        queue: ServerQueue,
        issuer: JobIssuer,
        schedule: Schedule,
        publisher: WeightPublisher,
        history: ConsumptionRecord,
        metrics: RolloutMetrics,
        should_stop: Callable[[], bool],
        in_order: bool = False,
        quotas: Quotas | None = None,
        is_uniform: Callable[[RolloutGroup], bool] | None = None,
        evaluations: Evaluations | None = None,
        learn: Callable[[Sequence[RolloutGroup]], None] | None = None,
        row_counts: Callable[[], list[RowCounts]] = list,
        resume_from: RolloutState | None = None,
        max_wait_s: float = 1800.0,
        finish_s: float = 0.0,
        way_to_workers: str,
    ) -> None:
        self._queue = queue
        self._issuer = issuer
        self._schedule = schedule.resumed(resume_from) if resume_from else schedule
        self._lookahead = schedule.lookahead()
        self._publisher = publisher
        self._history = history
        self._metrics = metrics
        self._should_stop = should_stop
        self._in_order = in_order
        self._quotas = quotas
        self._is_uniform = is_uniform
        self._evaluations = evaluations
        self._learn, self._row_counts = learn or (lambda groups: None), row_counts
        self._max_wait_s, self._finish_s, self._way_to_workers = max_wait_s, finish_s, way_to_workers

        self.rounds = resume_from.rounds if resume_from else 0  # batches trained on
        self._consumed_below = resume_from.consumed_below if resume_from else 0  # every usable group below it
        self._consumed = set(resume_from.consumed) if resume_from else set[int]()  # and these above it
        self.unusable = sorted(resume_from.unusable) if resume_from else []  # set aside for good, or dropped
        self._taken: list[UsedBatch] = []  # handed out since the last optimizer step
        self._open: dict[int, int] = {}  # issued and not taken -> no older version can have generated it
        self._ready: dict[int, RolloutGroup] = {}  # those of them that are finished
        self._task_of: dict[int, str] = {}  # of them all
        self._said_missing: set[str] = set()  # tasks that a batch was without
        self._sampled_by = dict(resume_from.waiting) if resume_from else {}  # what was finished at the checkpoint
        self._slept_s = 0.0  # in the wait for the current batch
        self.ends_at: int | None = None  # version with which training ends: jobs that no step would use are not issued
        self._uniform_in_a_row = 0  # groups with equal rewards since the last useful one
        self._failed_in_a_row = 0  # since the last group that came back
        self._last_failure = ""

    def advance(self, version: int) -> None:
        """Issue every job that may be issued while the trainer is at `version`."""
        if self._publisher.held_at is not None:  # workers see nothing newer, and could not serve a job that asks for it
            version = min(version, self._publisher.held_at)
        self._schedule = self._schedule.not_behind(self.rounds + len(self._taken), version)
        most = self._schedule.groups_ahead if self._in_order else self._lookahead.groups
        seen: SeenOfTrainer | None = None
        while self._issuer.submit_held_back() and len(self._open) < most:
            position = self._issuer.next_seq - bisect_left(self.unusable, self._issuer.next_seq)
            if not self._schedule.is_admissible(position, version, self._queue.open_jobs, self.ends_at):
                return
            oldest_version = self._schedule.oldest_version_for(position)
            seen = seen or self._issuer.look()
            job = self._issuer.issue(version, oldest_version, seen)
            if job is not None:
                self._open[job.seq], self._task_of[job.seq] = oldest_version, job.task

    def take(self, version: int) -> list[RolloutGroup]:
        """One generation batch of groups, those of the oldest weights first, none over `max_staleness` versions old.

        Raises:
            StopTraining: the run was asked to end.
            AllGroupsFailedError: nothing but failures came back.
            WaitTimeoutError: the batch was not complete after `max_wait_s`.
        """
        started, self._slept_s = time.monotonic(), 0.0
        self._schedule = self._schedule.with_round_at(self.rounds + len(self._taken), version)
        if self.ends_at is not None and version >= self.ends_at:  # a callback of the user's has raised max_steps
            self.ends_at = None
        self._publisher.retry()
        try:
            batch = self._wait_for_batch(version)
        finally:
            seconds = time.monotonic() - started
            self._metrics.waited(seconds, busy=seconds - self._slept_s)
        seqs, versions = [group.job.seq for group in batch], [group.policy_version for group in batch]
        self._taken.append(UsedBatch(version_used=version, seqs=seqs, policy_versions=versions))
        self._metrics.batch_taken(batch, version)
        self._learn(batch)
        self._say_missing_tasks(batch)
        return batch

    def finish_open(self, version: int) -> bool:
        """Wait until every job that was issued is finished or given up.

        False if the run was asked to end, and its workers have ended or do not finish in time: a resumed run then has
        these jobs done with newer weights.

        Raises:
            AllGroupsFailedError, WaitTimeoutError: as `take`.
        """
        patience, ends_at = self._patience(), math.inf
        self._collect(version)
        with Reminder(self._waiting_for, self._waiting_on) as reminder:
            while self._unfinished():
                if self._should_stop():
                    ends_at = min(ends_at, time.monotonic() + self._finish_s)
                    gives_up = time.monotonic() >= ends_at or not self._queue.workers()
                    self._collect(version)  # also what a worker handed over just before it ended
                    if gives_up and self._unfinished():
                        self._say_unfinished(version)
                        return False
                self._wait(patience, reminder)
                self._collect(version)
        return True

    def _unfinished(self) -> int:
        return sum(seq not in self._ready for seq in self._open)

    def _say_unfinished(self, version: int) -> None:
        logger.warning(
            "not finished when the run ended: {} of version {}. When the run is resumed, version {} samples the rest, "
            "so its weights will differ from those of a run that was never stopped. --stop-grace gives it more time",
            counted(self._unfinished(), "group"),
            self._publisher.version,
            version,
        )

    def finish_evaluation(self, version: int) -> bool:
        """Wait for the end of the evaluation that is under way; False if the run was asked to end before.

        Raises:
            WaitTimeoutError: no problem of it was answered for `max_wait_s`.
        """
        evaluations = self._evaluations
        if evaluations is None or not evaluations.busy:
            return True
        patience = self._patience()
        with Reminder(evaluations.describe, self._waiting_on) as reminder:
            while evaluations.busy:
                if self._should_stop():
                    return False
                self._wait(patience, reminder)
                self._collect(version)
        return True

    def trained(self) -> list[UsedBatch]:
        """An optimizer step is done: what was taken for it counts as consumed, and a checkpoint may say so."""
        used, self._taken = self._taken, []
        for batch in used:
            self.rounds += 1
            self._consumed.update(batch.seqs)
        unusable = self.unusable[bisect_left(self.unusable, self._consumed_below) :]
        self._consumed_below, self._consumed = pack_consumed(self._consumed_below, self._consumed, unusable)
        return used

    def state_at(self, step: int, passes_done: int) -> RolloutState:
        """What a checkpoint of optimizer step `step` says of the rollouts.

        Args:
            passes_done: forward passes on the last batch, 0 if all of them are done.
        """
        return RolloutState(
            run_id=self._issuer.run_id,
            step=step,
            next_seq=self._issuer.next_seq,
            rounds=self.rounds,
            unusable=list(self.unusable),
            consumed_below=self._consumed_below,
            consumed=sorted(self._consumed),
            passes_done=passes_done,
            waiting=[Sampled(seq, self._open[seq]) for seq in sorted(self._ready)] if self._in_order else [],
            row_counts=self._row_counts(),
        )

    def _wait_for_batch(self, version: int) -> list[RolloutGroup]:
        patience = self._patience()
        starved = False
        if (batch := self._complete_batch(version)) is None:
            logger.debug("the batch of version {} is not complete: {}", version, self._why_incomplete())
        with Reminder(self._waiting_for, self._waiting_on) as reminder:
            while batch is None:
                held_back = self._publisher.held_at is not None  # the trainer waits for the end of an evaluation
                starved = starved or not (held_back or self._queue.unclaimed())
                if self._should_stop():
                    raise StopTraining
                self._wait(patience, reminder)
                batch = self._complete_batch(version)
        self._lookahead.batch_taken(starved=starved)
        return batch

    def _why_incomplete(self) -> str:
        late = [seq for seq in sorted(self._open) if seq not in self._ready]
        return f"{len(self._ready)} groups are there for {self._schedule.groups_per_round}; under way: {late[:8]}"

    def _complete_batch(self, version: int) -> list[RolloutGroup] | None:
        self._collect(version)
        self.advance(version)
        by_age = sorted(self._open, key=lambda seq: (0 if self._in_order else self._open[seq], seq))
        chosen = self._chosen(by_age, version)
        if chosen is None:
            return None
        left = [(self._open[seq], seq in self._ready) for seq in by_age if seq not in chosen]
        if self._schedule.must_wait(left, self.rounds + len(self._taken), version):
            return None
        for seq in chosen:
            self._forget(seq)
        return [self._ready.pop(seq) for seq in sorted(chosen)]

    def _chosen(self, by_age: Sequence[int], version: int) -> Sequence[int] | None:
        """The groups of the next batch; None as long as they are not finished.

        Quotas give way to the staleness bound: a group that would be over age in the round after goes first.
        """
        size = self._schedule.groups_per_round
        candidates = by_age[:size] if self._in_order else by_age
        oldest = [seq for seq in candidates if seq in self._ready][:size]
        if self._quotas is None or self._in_order:
            return oldest if len(oldest) == size else None
        fair = with_each_task(by_age, self._ready, self._task_of, self._quotas, size)
        left = [(self._open[seq], False) for seq in by_age if seq not in (fair or ())]
        grows_too_old = self._schedule.must_wait(left, self.rounds + len(self._taken), version)
        return oldest if fair is not None and grows_too_old else fair

    def _say_missing_tasks(self, batch: Sequence[RolloutGroup]) -> None:
        missing = {*(self._quotas or ())} - {group.job.task for group in batch}
        self._metrics.tasks_missing(len(missing) if self._quotas else None)
        for task in sorted(missing - self._said_missing):
            logger.warning(
                "a batch has no group of task {!r}: all that were under way failed or were left out. It is filled with "
                "others; this is said once, and async/tasks_missing counts it",
                task,
            )
        self._said_missing |= missing

    def _collect(self, version: int) -> None:
        if self._evaluations is not None:
            before = self._evaluations.done
            self._evaluations.look()
            if self._evaluations.done > before:
                activity.progress()
            self._publisher.retry()  # where it has ended: jobs that are issued now may need what it held back
        with suppress(DiskFullError):  # no space in done/: the group stays in the queue, and `_wait` makes space
            for entry in self._queue.finished():
                group = self._queue.take(entry)
                if group is not None:
                    self._came_back(group)
        over_age = self._schedule.is_over_age  # only a resumed run has such groups, of before it was interrupted
        for seq in [seq for seq, group in self._ready.items() if over_age(group.policy_version, version)]:
            self._leave_out(self._ready.pop(seq), "over age")
        for seq, given_up in self._queue.given_up.items():
            if seq in self._open:
                self._set_aside(seq, given_up.reason)
        self._note_unclaimed()

    def _came_back(self, group: RolloutGroup) -> None:
        activity.progress()
        logger.debug("group {} came back, of version {} from {}", group.job.seq, group.policy_version, group.worker)
        self._failed_in_a_row = 0
        self._usable_again(group.job.seq)
        if self._teaches_nothing(group):
            self._leave_out(group, "equal rewards")
        else:
            self._ready[group.job.seq] = group
            self._open[group.job.seq], self._task_of[group.job.seq] = group.policy_version, group.job.task
            self._compare_version(group)

    def _compare_version(self, group: RolloutGroup) -> None:
        before = self._sampled_by.pop(group.job.seq, group.policy_version)
        if group.policy_version != before:
            logger.warning(
                "the file of prompt group {} was lost. Version {} sampled it, whose weights are no more, and now "
                "version {}: the weights of this run will differ from those of a run that nothing disturbed",
                group.job.seq,
                before,
                group.policy_version,
            )

    def _usable_again(self, seq: int) -> None:
        """The job had failed for good, and an operator had it tried once more."""
        at = bisect_left(self.unusable, seq)
        if self.unusable[at : at + 1] != [seq]:
            return
        del self.unusable[at]
        if seq < self._consumed_below:  # it is not consumed yet
            self._consumed.update(set(range(seq + 1, self._consumed_below)) - set(self.unusable))
            self._consumed_below = seq

    def _teaches_nothing(self, group: RolloutGroup) -> bool:
        if self._is_uniform is None or not self._is_uniform(group):
            self._uniform_in_a_row = 0
            return False
        self._uniform_in_a_row += 1
        limit = UNIFORM_ROUNDS * self._schedule.groups_per_round
        if self._uniform_in_a_row == limit:
            logger.warning(
                "the last {} groups had equal rewards each: such groups are used now, or none would be", limit
            )
        return self._uniform_in_a_row < limit

    def _leave_out(self, group: RolloutGroup, reason: str) -> None:
        """The group is not trained on; another takes its place."""
        logger.debug("group {} is left out: {}", group.job.seq, reason)
        self._metrics.group_dropped(group)
        self._learn([group])
        self._forget(group.job.seq)
        insort(self.unusable, group.job.seq)
        self._history.dropped(group.job.seq, reason)

    def _forget(self, seq: int) -> None:
        self._open.pop(seq, None)
        self._task_of.pop(seq, None)

    def _set_aside(self, seq: int, reason: str) -> None:
        self._forget(seq)
        insort(self.unusable, seq)
        self._failed_in_a_row += 1
        self._metrics.quarantined += 1
        text = "prompt group {} failed for good and is set aside in quarantine/: {}"
        last_line = reason.strip().rsplit("\n", 1)[-1]
        logger.warning(text, seq, "as the one before" if last_line == self._last_failure else last_line)
        self._last_failure = last_line
        if self._failed_in_a_row >= max(self._schedule.groups_per_round, MIN_FAILURES):
            raise AllGroupsFailedError(
                f"The last {self._failed_in_a_row} prompt groups all failed, so there is nothing to train on. "
                f"The last one failed with:\n{reason.strip()}"
            )

    def _note_unclaimed(self) -> None:
        """A job that no worker has claimed yet will be generated by what is published now, or by something newer."""
        published = self._publisher.version
        if published is None:
            return
        for seq in self._queue.unclaimed():
            if seq in self._open:
                self._open[seq] = max(self._open[seq], published)

    def _patience(self) -> _Patience:
        """For one wait. An evaluation may hold the groups up, as long as it goes on."""
        evaluations = self._evaluations
        return _Patience(self._max_wait_s, lambda: evaluations.done if evaluations is not None else 0)

    def _wait(self, patience: _Patience, reminder: Reminder) -> None:
        if patience.is_over():
            raise WaitTimeoutError(f"Timed out after {self._max_wait_s:.0f} s waiting for {self._waiting_for()}.")
        reminder.tick()
        started = time.monotonic()
        self._queue.wait(WAKE_S)
        self._issuer.make_space_for_groups()
        self._slept_s += time.monotonic() - started
        self._publisher.retry()

    def _waiting_on(self) -> list[str]:
        """The workers that have claimed jobs; if none has, every worker, since each may claim one."""
        return self._queue.claimants() or [worker.name for worker in self._queue.workers()]

    def _waiting_for(self) -> str:
        if self._issuer.disk_full:
            return "room on the disk for new jobs"
        counts = self._queue.counts()
        workers = len(self._queue.workers())
        missing = max(1, self._schedule.groups_per_round - len(self._ready))
        if workers == 0:
            return f"{counted(missing, 'group')}, and no worker is alive: {self._way_to_workers}"
        if self._evaluations is not None and self._evaluations.busy:
            return self._evaluations.describe()
        return (
            f"{counted(missing, 'more group')} from {counted(workers, 'worker')} "
            f"({counts.pending} pending, {counts.processing} in process)"
        )


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
