"""What every worker does with jobs, whatever engine generates: claim, have scored, hand back, fail, wait."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loguru import logger

from async_grpo.errors import DiskFullError, PeerDiedError, UnsupportedError
from async_grpo.queue import Claim, WorkerQueue
from async_grpo.records import Timings
from async_grpo.rundir import paths as runs
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import WorkerSettings
from async_grpo.setup.process import StopRequest
from async_grpo.telemetry.activity import GENERATING, SCORING, activity
from async_grpo.telemetry.waiting import Reminder

if TYPE_CHECKING:
    from async_grpo.rollout.scoring import Scored
    from async_grpo.rollout.trl_trainer import GeneratedGroup
    from async_grpo_ipc import RemoteWeights


SERVER_WAIT_S = 3600.0  # for a parameter server to start, or to come back after it died
WEIGHTS_WAIT_S = 600.0  # for a version that the trainer has announced
HEAD_START_S = 2.0  # that other workers have with a job that failed on this one
SAY_AT_MOST = 3  # failures of the same text that are shown
DISK_FULL_RETRY_S = 1.0
SCORING_WAKE_S = 0.02  # a worker that has groups being scored looks for new jobs this often
IDLE_WAKE_S = 0.5  # an idle worker looks at the run's state this often


class StopWorking(Exception):  # no error: the worker was asked to end
    """Raised inside generation when the worker was asked to stop; its jobs go back to the queue."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a generated group keeps while it is scored."""

    claim: Claim
    version: int
    share: Timings
    token_versions: list[list[int]] | None = None  # [G][tokens], where weights change while a group is generated


class Worker(ABC):
    """The loop of one worker, with everything that it needs at hand. A subclass decides how groups are generated."""

    def __init__(
        self,
        *,
        trainer: Any,
        queue: WorkerQueue,
        weights: RemoteWeights,
        run: RunDir,
        stop: StopRequest,
        settings: WorkerSettings,
        deterministic: bool,
    ) -> None:
        from async_grpo.rollout.scoring import Scoring

        self._trainer = trainer
        self._queue = queue
        self._weights = weights
        self._run = run
        self._stop = stop
        self._groups_per_round = trainer.args.generation_batch_size // trainer.num_generations
        self._groups_per_claim = settings.groups_per_claim
        self._deterministic = deterministic
        self._scoring: Scoring[Rollout] = Scoring(trainer.score, settings.score_concurrency)
        # An environment is used again for the next batch, so its rewards must be had before that.
        self._score_beside = not deterministic and trainer.environment_factories is None
        self._failed_here: dict[int, float] = {}  # job that failed on this worker -> when (monotonic seconds)
        self._said: Counter[str] = Counter()  # what jobs failed with
        self._queue_s = 0.0  # spent on the queue since the last group was handed back
        self._server_died_at: float | None = None
        self.statistics = WorkerStatistics()

    def work(self) -> None:
        """Serve jobs until the run has ended or the process was asked to stop."""
        with suppress(StopWorking):
            self._work()

    @abstractmethod
    def _work(self) -> None: ...

    @abstractmethod
    def _room(self) -> int:
        """How many groups to claim now."""

    def _claim(self) -> list[Claim]:
        if self._server_died_at is not None or self._scoring.backlog:
            return []
        started = time.monotonic()
        if not (room := self._room()):
            return []
        try:
            claims = self._queue.claim(room, skip=self._better_left_to_others())
        except DiskFullError as error:  # a broken file could not be set aside; its job waits with us
            logger.warning("{} Waiting for room.", error)
            time.sleep(DISK_FULL_RETRY_S)
            return []
        if claims:
            activity.has_jobs((claim.job.seq for claim in claims), GENERATING)
            self._queue_s += time.monotonic() - started
        return claims

    def _score(self, rollout: Rollout, group: GeneratedGroup) -> None:
        activity.has_jobs([rollout.claim.job.seq], SCORING)
        if self._score_beside:
            self._scoring.start(rollout, group)
        else:
            from async_grpo.rollout.scoring import score_one

            activity.doing(SCORING)
            self._publish(score_one(self._trainer.score, rollout, group))

    def _publish_scored(self, timeout_s: float) -> None:
        for outcome in self._scoring.finished(timeout_s):
            self._publish(outcome)

    def _publish(self, outcome: Scored[Rollout]) -> None:
        """Hand a scored group back, or its job where scoring failed."""
        from async_grpo.rollout.trl_trainer import to_record

        activity.progress()
        started = time.monotonic()
        claim = outcome.key.claim
        if outcome.scores is None:
            self._failed(claim, outcome.error)
            return
        try:
            group = to_record(
                claim.job,
                outcome.group,
                outcome.scores,
                attempt=claim.attempt,
                worker=self._queue.name,
                policy_version=outcome.key.version,
                token_versions=outcome.key.token_versions,
                reward_names=self._trainer.reward_func_names,
                timings=replace(outcome.key.share, score_s=outcome.seconds, queue_s=self._queue_s),
            )
            self._when_there_is_room(lambda: self._queue.complete(claim, group))
            self._queue_s = time.monotonic() - started
        except UnsupportedError:  # the user's `log_extra` or completions hold what no file can
            self._failed(claim, traceback.format_exc())
            return
        self.statistics.add("scoring", outcome.seconds)
        self.statistics.jobs += 1
        activity.no_longer_has(claim.job.seq, done=True)

    def _failed(self, claim: Claim, error: str) -> None:
        self.statistics.failed += 1
        self._failed_here[claim.job.seq] = time.monotonic()
        last_line = error.strip().rsplit("\n", 1)[-1]
        self._said[last_line] += 1
        level = "WARNING" if self._said[last_line] <= SAY_AT_MOST else "DEBUG"
        more = "; more of the same are not shown" if self._said[last_line] == SAY_AT_MOST else ""
        logger.log(level, "prompt group {} (attempt {}) failed: {}{}", claim.job.seq, claim.attempt, last_line, more)
        self._when_there_is_room(lambda: self._queue.fail(claim, error))
        activity.no_longer_has(claim.job.seq, failed=True)

    def _when_there_is_room(self, write: Callable[[], None]) -> None:
        """Write to the queue; on a full disk keep the claim and wait until there is room."""
        said = False
        with Reminder(lambda: f"room on the disk of {self._run.root}") as reminder:
            while True:
                try:
                    return write()
                except DiskFullError as error:
                    if not said:
                        logger.warning("{} Keeping the job and waiting for room.", error)
                    said = True
                if self._stop:
                    raise StopWorking
                reminder.tick()
                time.sleep(DISK_FULL_RETRY_S)

    def _hand_back(self, claims: list[Claim]) -> None:
        for claim in claims:
            self._queue.hand_back(claim)
            activity.no_longer_has(claim.job.seq)

    def _better_left_to_others(self) -> set[int]:
        """Jobs that have just failed here: another worker, if there is one, gets to try them first."""
        if self._queue.alive_workers() < 2:
            return set()
        now = time.monotonic()
        return {seq for seq, when in self._failed_here.items() if now - when < HEAD_START_S}

    def _run_goes_on(self) -> bool:
        state = self._run.read_state()
        if state is None or state.state != runs.RUNNING:
            return False
        if self._weights.exporter_alive():
            self._server_died_at = None
            return True
        if self._server_died_at is None:
            self._server_died_at = time.monotonic()
            logger.warning("the parameter server is gone; waiting for it to come back (--resume)")
        return time.monotonic() - self._server_died_at < SERVER_WAIT_S

    def _waiting_for(self) -> str:
        if self._server_died_at is not None:
            return "the parameter server to come back"
        return "jobs: the trainer has issued as many as the staleness bound admits"


def server_lives(run: RunDir) -> bool:
    return KernelLock(run.lock).is_held()


def check_server(run: RunDir) -> None:
    """Raise `PeerDiedError` when nobody serves the run any more."""
    if not server_lives(run):
        raise PeerDiedError(f"The parameter server of {run.root} is gone. Start it again with --resume.")


@dataclass(slots=True)
class Spread:
    """Least, mean and most of what was added, without keeping it: a worker may run for weeks."""

    count: int = 0
    total: float = 0.0
    least: float = float("inf")
    most: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def __str__(self) -> str:
        return f"{self.least:.4f}/{self.total / self.count:.4f}/{self.most:.4f}"


@dataclass(slots=True)
class WorkerStatistics:
    """Counts jobs and keeps the spread of every batch's phases, in seconds."""

    jobs: int = 0
    failed: int = 0
    phases: dict[str, Spread] = field(
        default_factory=lambda: {name: Spread() for name in ("generation", "scoring", "weight adoption")}
    )
    _started: float = field(default_factory=time.monotonic)

    def add(self, phase: str, seconds: float) -> None:
        self.phases[phase].add(seconds)

    def report(self) -> str:
        """`42 jobs (1 failed), 3.1 jobs/s; generation 0.10/0.12/0.31 s, … (least/mean/most)`."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        failed = f" ({self.failed} failed)" if self.failed else ""
        phases = [f"{name} {spread} s" for name, spread in self.phases.items() if spread.count]
        tail = f"; {', '.join(phases)} (least/mean/most)" if phases else ""
        return f"{self.jobs} jobs{failed}, {self.jobs / elapsed:.2f} jobs/s{tail}"
