"""The loop of a rollout worker, the same for every engine.

    claim -> adopt -> start and step -> score -> publish

`Worker.run` has it in this order. One thread does all of it but the reward functions.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_grpo.archive.disk_space import RETRY_S, retry_while_full
from async_grpo.engines import WeightsLostError
from async_grpo.engines.policy import WEIGHTS_WAIT_S
from async_grpo.errors import BadGroupError, DiskFullError, PeerDiedError, UnsupportedError, WaitTimeoutError
from async_grpo.log import logger
from async_grpo.queue import Claim, WorkerQueue
from async_grpo.records import Timings
from async_grpo.rollout.failures import Failures, refusal_in
from async_grpo.rundir import paths as runs
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import SERVER, RunDir, RunState
from async_grpo.settings import WorkerSettings
from async_grpo.telemetry.activity import GENERATING, SCORING, activity
from async_grpo.telemetry.waiting import Reminder

if TYPE_CHECKING:
    from async_grpo.engines import Engine
    from async_grpo.rollout.trl_group import GeneratedGroup, GroupOutcome
    from async_grpo.rollout.trl_trainer import RolloutTrainer
    from async_grpo_ipc import RemoteWeights

SERVER_WAIT_S = 3600.0  # for a parameter server to start, or to come back after it died
HEAD_START_S = 2.0  # that other workers have with a job that failed on this one
LATE_S = 2.0  # a job whose weights are not there for so long gives way to others
SCORING_WAKE_S = 0.02  # a worker that has groups being scored looks for new jobs this often
IDLE_WAKE_S = 0.5  # an idle worker looks at the run's state this often
RUN_LOOK_S = 0.2  # any other does so this often
ISSUING_S = 0.002  # longer than the server takes to issue the next job of a round
LOOK_S = 0.02  # a worker that is sampling looks for jobs and weights this often
SERVER_POLL_S = 0.02  # a worker that no server serves looks for one this often
WEIGHTS_POLL_S = 0.002  # a worker that has nothing to do but wait for weights looks for them this often


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker works with, whatever its engine."""

    trl: RolloutTrainer
    queue: WorkerQueue
    weights: RemoteWeights
    run: RunDir
    should_stop: Callable[[], bool]
    settings: WorkerSettings
    deterministic: bool
    check_run: Callable[[RunState], None] = lambda state: None  # raises if run.json asks for another trainer by now


@dataclass(slots=True)
class Spread:
    """Minimum, mean and maximum of what was added, in constant memory: a worker may run for weeks."""

    count: int = 0
    total: float = 0.0
    min: float = float("inf")
    max: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.min = min(self.min, value)
        self.max = max(self.max, value)

    def __str__(self) -> str:
        return f"{self.min:.4f}/{self.total / self.count:.4f}/{self.max:.4f}"


@dataclass(slots=True)
class WorkerStatistics:
    """Counts jobs and keeps the spread of each phase, in seconds."""

    jobs: int = 0
    failed: int = 0
    generation: Spread = field(default_factory=Spread)  # of groups
    scoring: Spread = field(default_factory=Spread)
    adoption: Spread = field(default_factory=Spread)  # of new weights
    _started: float = field(default_factory=time.monotonic)

    def report(self) -> str:
        """`42 jobs (1 failed), 3.1 jobs/s; generation 0.10/0.12/0.31 s, … (min/mean/max)`."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        failed = f" ({self.failed} failed)" if self.failed else ""
        phases = {"generation": self.generation, "scoring": self.scoring, "weight adoption": self.adoption}
        spreads = [f"{name} {spread} s" for name, spread in phases.items() if spread.count]
        tail = f"; {', '.join(spreads)} (min/mean/max)" if spreads else ""
        return f"{self.jobs} jobs{failed}, {self.jobs / elapsed:.2f} jobs/s{tail}"


@dataclass(slots=True)
class _InFlight:
    """A claimed job that is being sampled or scored."""

    claim: Claim
    version: int  # policy version that it was started with
    adopt_s: float  # its share of the time for adopting weights
    started: float
    busy_s: float  # its share of the engine's time; until it has ended, less the worker's clock at its start


class Worker:
    """Serves jobs until the run has ended or `should_stop` says so."""

    def __init__(self, context: WorkerContext, engine: Engine) -> None:
        from async_grpo.rollout.generation import generation
        from async_grpo.rollout.scoring import Scoring, reward_calls

        self._generation = generation(context.trl, engine, context.settings)
        self._queue, self._run_dir, self._should_stop = context.queue, context.run, context.should_stop
        self._check_run = context.check_run
        self._weights, self._policy = context.weights, engine.follow(context.weights)
        self._groups_per_claim, self._deterministic = context.settings.groups_per_claim, context.deterministic
        calls = reward_calls(context.trl.trainer, context.settings, deterministic=context.deterministic)
        self._scoring = Scoring(context.trl, calls)
        self._held: deque[Claim] = deque()  # claimed, and waiting for weights
        self._held_since = 0.0
        self._started: dict[int, _InFlight] = {}  # by the job's seq, until it is handed back or has failed
        self._sampling: dict[int, _InFlight] = {}  # those of them that the engine has
        self._version: int | None = None  # that groups can start with now; None: they wait for those being sampled
        self._adopt_s = 0.0  # spent on adopting since a group was started
        self._busy_clock = 0.0  # grows by an engine step's seconds, divided by the groups that shared it
        self._look_at = self._check_run_at = 0.0
        self._left_to_others: dict[int, float] = {}  # job that failed here, or gave way -> until (monotonic seconds)
        self._failures = Failures(context.run.root / "quarantine")
        self._queue_s = 0.0  # spent on the queue since the last group was handed back
        self._unserved_since: float | None = None  # when the server was gone, or not serving yet (monotonic seconds)
        self.statistics = WorkerStatistics()

    def run(self) -> None:
        reminder = None  # of what the worker waits for, while it does
        try:
            while self._run_goes_on():
                if self._time_to_look():
                    self._claim()
                    self._adopt()
                self._start()
                for group in self._step():
                    self._scoring.start(group, alone=self._started[group.job.seq].claim.attempt > 0)
                idle = not self._sampling and self._scoring.busy  # then it waits a moment for scores
                if idle:
                    activity.doing(SCORING)
                for outcome in self._scoring.finished(SCORING_WAKE_S if idle else 0):
                    self._publish(outcome)
                busy = self._sampling or self._scoring.busy
                reminder = None if busy else self._wait(reminder)
        finally:
            self._generation.close()  # the queue hands the jobs back when it is closed

    # Jobs and weights: a job is never sampled by weights that are older than the newest when it was claimed

    def _time_to_look(self) -> bool:
        """Whether to look for jobs and weights: at every step while nothing is sampled, else now and then."""
        now = time.monotonic()
        if self._sampling and (not self._generation.joins or now < self._look_at):
            return False
        self._look_at = now + LOOK_S
        return True

    def _claim(self) -> None:
        started = time.monotonic()
        self._left_to_others = {seq: until for seq, until in self._left_to_others.items() if started < until}
        if self._unserved_since is not None or self._scoring.is_full or not (capacity := self._capacity()):
            return
        try:
            claims = self._queue.claim(capacity, skip=self._started.keys() | self._left_to_others.keys())
        except DiskFullError as error:  # a broken file could not be set aside; its job waits with us
            logger.warning("{} Waiting for room.", error)
            time.sleep(RETRY_S)
            return
        if claims:
            logger.debug("claimed jobs {}", ", ".join(f"{each.job.seq} (try {each.attempt + 1})" for each in claims))
            activity.has_jobs((claim.job.seq for claim in claims), GENERATING)
            self._queue_s += time.monotonic() - started
            if not self._held:
                self._held_since = started
            self._held += claims

    def _capacity(self) -> int:
        """An even share of what is pending or in flight here, as far as the engine has capacity for it."""
        if self._sampling and self._version is None:  # new weights wait until the engine is empty
            return 0
        mine, most = len(self._sampling) + len(self._held), self._generation.most_groups
        if most and self._deterministic:
            most = 1  # what shares a batch changes the bits
        elif most and self._groups_per_claim:
            most = self._groups_per_claim
        if mine >= most or (mine and not self._generation.joins):
            return 0
        pending = once_issued(self._queue.pending, 0 if self._generation.joins else most)
        if not self._generation.joins and self._groups_per_claim:
            return most
        share = math.ceil((pending + mine) / max(1, self._queue.alive_workers()))
        return max(0 if self._generation.joins else 1, min(most, share) - mine)

    def _adopt(self) -> None:
        """Take on the newest weights, as far as the groups in flight allow it."""
        while self._unserved_since is not None and self._held:
            self._hand_back(self._held.popleft())
        nothing_published = self._version is None and self._weights.version is None
        if not (self._held or self._sampling) or nothing_published:
            return
        started, before = time.monotonic(), self._version
        try:
            self._version = self._policy.adopt({flight.version for flight in self._sampling.values()})
        except PeerDiedError as error:  # claims wait for the next server, or go back once this one is known to be dead
            if isinstance(error, WeightsLostError):
                self._hand_back_sampling()
            self._version, self._check_run_at = None, 0.0
            return
        self._adopt_s += time.monotonic() - started
        if self._version is not None and self._version != before:
            activity.doing(GENERATING, version=self._version)
            self.statistics.adoption.add(time.monotonic() - started)
            logger.debug("version {} is adopted, after {}", self._version, before)

    # Groups

    def _start(self) -> None:
        """Start the claimed jobs that the adopted version may sample."""
        version = self._version
        ready = [claim for claim in self._held if version is not None and claim.job.min_version <= version]
        if not ready or (len(ready) < len(self._held) and not self._generation.joins):  # a batch is not divided
            if self._held:
                self._wait_for_weights(late=[claim for claim in self._held if claim not in ready])
            return
        assert version is not None
        adopt_s, self._adopt_s, now = self._adopt_s / len(ready), 0.0, time.monotonic()
        for claim in ready:
            self._held.remove(claim)
            flight = _InFlight(claim, version, adopt_s, started=now, busy_s=-self._busy_clock)
            self._started[claim.job.seq] = self._sampling[claim.job.seq] = flight
        self._generation.start([claim.job for claim in ready], version)

    def _step(self) -> list[GeneratedGroup]:
        """Sample one token more of every group; returns the groups that have ended."""
        ended: list[GroupOutcome] = []
        if self._sampling:
            activity.doing(GENERATING)
            started, groups = time.monotonic(), len(self._sampling)
            ended = self._generation.step()
            if not self._weights.intact(wait=bool(ended)):  # no wait for the GPU at every token
                self._hand_back_sampling(ended)
                return []
            self._busy_clock += (time.monotonic() - started) / groups
            for outcome in ended:
                flight = self._sampling.pop(outcome.job.seq)
                flight.busy_s += self._busy_clock
                self.statistics.generation.add(time.monotonic() - flight.started)
                if outcome.error is not None:
                    self._failed(outcome.job.seq, outcome.error)
        if not self._sampling:
            self._weights.release()
        return [outcome.group for outcome in ended if outcome.group is not None]

    # Jobs that are done, and jobs that failed

    def _publish(self, outcome: GroupOutcome) -> None:
        """Hand a scored group back, or its job where scoring failed."""
        from async_grpo.rollout.trl_group import to_record

        activity.progress()
        if outcome.error is not None:
            self._failed(outcome.job.seq, outcome.error)
            return
        assert outcome.group is not None and outcome.scores is not None
        started, flight = time.monotonic(), self._started[outcome.job.seq]
        claim = flight.claim
        timings = Timings(
            adopt_s=flight.adopt_s, generate_s=flight.busy_s, score_s=outcome.seconds, queue_s=self._queue_s
        )
        try:
            group = to_record(
                outcome.group, outcome.scores, attempt=claim.attempt, worker=self._queue.name, timings=timings
            )
            done = self._when_there_is_space(lambda: self._queue.complete(claim, group))
        except (UnsupportedError, BadGroupError) as error:  # what the user's code made of it cannot be written
            self._failed(claim.job.seq, error)
            return
        if done:
            del self._started[claim.job.seq]
            self._queue_s = time.monotonic() - started
            self.statistics.scoring.add(outcome.seconds)
            self.statistics.jobs += 1
            logger.debug("group {} of version {} is handed in", claim.job.seq, group.policy_version)
            activity.no_longer_has(claim.job.seq, done=True)

    def _failed(self, seq: int, error: BaseException) -> None:
        if (refusal := refusal_in(error)) is not None:
            raise refusal
        self._sampling.pop(seq, None)
        claim, text = self._started.pop(seq).claim, "".join(traceback.format_exception(error))
        self.statistics.failed += 1
        self._failures.add(seq, claim.attempt, text)
        if self._queue.alive_workers() > 1:
            self._left_to_others[seq] = time.monotonic() + HEAD_START_S
        if self._when_there_is_space(lambda: self._queue.fail(claim, text)):
            activity.no_longer_has(seq, failed=True)

    def _when_there_is_space(self, write: Callable[[], None]) -> bool:
        """Write to the queue; on a full disk keep the claim and wait for space. False: asked to stop meanwhile."""
        try:
            write()
        except DiskFullError:
            with suppress(DiskFullError):
                retry_while_full(write, should_stop=self._should_stop)
                return True
            return False
        return True

    def _hand_back_sampling(self, ended: Sequence[GroupOutcome] = ()) -> None:
        """The weights were lost while they were read, so what they gave is not believed."""
        logger.warning("the weights were lost with the parameter server; jobs handed back: {}", len(self._sampling))
        self._generation.close()
        for outcome in ended:
            if outcome.group is not None and outcome.group.let_go is not None:
                outcome.group.let_go()
        self._weights.release()
        for seq in [*self._sampling]:
            del self._sampling[seq]
            self._hand_back(self._started.pop(seq).claim)
        self._version, self._check_run_at = None, 0.0

    def _hand_back(self, claim: Claim) -> None:
        logger.debug("job {} is returned: it needs version {} or newer", claim.job.seq, claim.job.min_version)
        self._queue.hand_back(claim)
        activity.no_longer_has(claim.job.seq)

    # Waiting

    def _run_goes_on(self) -> bool:
        now = time.monotonic()
        if now < self._check_run_at:
            return True
        self._check_run_at = now + RUN_LOOK_S
        if self._should_stop():
            return False
        state = self._run_dir.read_state()
        if state is None or state.state != runs.RUNNING:
            return False
        self._check_run(state)
        if self._queue.served():
            self._unserved_since = None
            return True
        self._check_run_at = now + SERVER_POLL_S
        if self._unserved_since is None:
            self._unserved_since = now
            if not server_alive(self._run_dir.root):
                logger.warning("the parameter server is gone; waiting for it to come back (--resume)")
        if now - self._unserved_since >= SERVER_WAIT_S:
            raise WaitTimeoutError(
                f"Timed out after {SERVER_WAIT_S:.0f} s waiting for {self._waiting_for()} in {self._run_dir.root}. "
                "Start the server again with --resume, and then this worker."
            )
        return True

    def _wait(self, reminder: Reminder | None) -> Reminder:
        """Wait a moment for a job, or for the weights that a claimed job needs."""
        reminder = reminder or Reminder(self._waiting_for, lambda: [SERVER])
        reminder.tick()
        if self._held:
            time.sleep(WEIGHTS_POLL_S)
        elif self._unserved_since is not None:  # there may be jobs, which are not claimed now
            time.sleep(SERVER_POLL_S)
        else:
            self._queue.wait(IDLE_WAKE_S, skip=self._left_to_others.keys())
        return reminder

    def _wait_for_weights(self, late: Sequence[Claim]) -> None:
        """Give way to other jobs when these need weights that do not come: an evaluation may hold those back."""
        now = time.monotonic()
        if self._sampling:
            self._held_since = now
        elif now - self._held_since > WEIGHTS_WAIT_S:
            raise WaitTimeoutError(f"Timed out after {WEIGHTS_WAIT_S:.0f} s waiting for {self._waiting_for()}.")
        elif now - self._held_since > LATE_S and self._version is not None:
            others = len(late) < len(self._held) or self._queue.pending() > 0
            for claim in late if others else ():
                self._held.remove(claim)
                self._hand_back(claim)
                self._left_to_others[claim.job.seq] = now + HEAD_START_S

    def _waiting_for(self) -> str:
        if self._held:
            return f"version {max(claim.job.min_version for claim in self._held)} of the weights"
        if self._unserved_since is not None:
            return "a parameter server that issues jobs"
        return "jobs: the trainer has issued as many as the staleness bound admits"


def once_issued(pending: Callable[[], int], enough: int) -> int:
    """How many jobs are pending when there are `enough`, or no more of them are being issued.

    The server issues a round job by job, and a batch of its first few takes nearly as long as one of them all.
    """
    before, now = 0, pending()
    while before < now < enough:
        time.sleep(ISSUING_S)
        before, now = now, pending()
    return now
