"""The rollout worker process: claims jobs, adopts the newest weights, generates, scores, hands the groups back."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from async_grpo import run_dir as runs
from async_grpo.devices import check_torch_sees
from async_grpo.errors import AsyncGRPOError, DiskFullError, PeerDiedError, UnsupportedError, WaitTimeoutError
from async_grpo.job_queue import Claim, WorkerQueue
from async_grpo.locks import KernelLock
from async_grpo.process import StopRequest, log_to, make_deterministic, own_compile_cache
from async_grpo.progress import Progress, progress_file
from async_grpo.records import Timings
from async_grpo.run_dir import RunDir, RunState
from async_grpo.settings import WorkerSettings
from async_grpo.setup_file import load_trainer
from async_grpo.waiting import Reminder, wait_until

if TYPE_CHECKING:
    from async_grpo.rollout.scoring import Scored
    from async_grpo.rollout.trl_hooks import GeneratedGroup
    from async_grpo_ipc import RemoteWeights

SERVER_WAIT_S = 3600.0  # for a parameter server to start, or to come back after it died
WEIGHTS_WAIT_S = 600.0  # for a version that the trainer has announced
HEAD_START_S = 2.0  # that other workers have with a job that failed on this one
SAY_AT_MOST = 3  # failures of the same text that are shown
DISK_FULL_RETRY_S = 1.0
SCORING_WAKE_S = 0.02  # a worker that has groups being scored looks for new jobs this often
IDLE_WAKE_S = 0.5  # an idle worker looks at the run's state this often


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What the command line decides about a worker."""

    run_dir: Path
    device: str  # "cpu" or a GPU index; the process already sees only this one
    worker_id: int | None = None  # None: the first free number
    config: Path | None = None  # None: the setup file of the parameter server
    settings: WorkerSettings
    log_level: str | None = None  # of the log file in the run directory; None: a launcher keeps it


class StopWorking(Exception):  # no error: the worker was asked to end
    """Raised inside generation when the worker was asked to stop; its jobs go back to the queue."""


def run_worker(options: WorkerOptions) -> None:
    """Work until the run ends or the process is asked to stop.

    Raises:
        AsyncGRPOError: no parameter server appeared, the setup file is broken, or the weights do not fit the model.
    """
    stop = StopRequest().install()
    run = RunDir(options.run_dir)
    state = _wait_for_run(run)
    with closing(WorkerQueue.open(run.root, options.worker_id, options.device)) as queue:
        if options.log_level is not None:
            log_to(run.worker_log(queue.device), options.log_level)
        own_compile_cache(queue.name, os.environ)
        logger.info("worker {} on {} serves run {} in {}", queue.name, options.device, state.run_id, run.root)
        check_torch_sees(options.device)
        if state.deterministic:
            make_deterministic()
        trainer = load_trainer(options.config or Path(state.config))

        from async_grpo.rollout.trl_hooks import make_rollout_trainer
        from async_grpo_ipc import IPCError, open_remote_memory

        make_rollout_trainer(trainer)
        wait_until(
            lambda: run.weights_handle.exists() or None,
            what=f"weights from the parameter server ({run.weights_handle})",
            timeout_s=SERVER_WAIT_S,
            check_peer=lambda: _check_server(run),
        )
        try:
            with open_remote_memory(run.weights_handle, timeout_s=WEIGHTS_WAIT_S) as weights:
                stop.defer()
                worker = Worker(
                    trainer=trainer,
                    queue=queue,
                    weights=weights,
                    run=run,
                    stop=stop,
                    settings=options.settings,
                    deterministic=state.deterministic,
                )
                try:
                    worker.work()
                finally:
                    logger.info("worker {} ends: {}", queue.name, worker.statistics.report())
        except IPCError as error:
            raise AsyncGRPOError(f"The weights could not be adopted: {error}") from error


@dataclass(frozen=True, slots=True)
class _Rollout:
    """What a generated group keeps while it is scored."""

    claim: Claim
    version: int
    share: Timings


class Worker:
    """The loop of one worker, with everything that it needs at hand."""

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
        from async_grpo.rollout.policy_weights import PolicyWeights
        from async_grpo.rollout.scoring import Scoring
        from async_grpo.rollout.statistics import WorkerStatistics

        self._trainer = trainer
        self._queue = queue
        self._weights = weights
        self._policy = PolicyWeights(weights, trainer.model)
        self._run = run
        self._stop = stop
        self._groups_per_round = trainer.args.generation_batch_size // trainer.num_generations
        self._groups_per_claim = settings.groups_per_claim
        self._deterministic = deterministic
        self._scoring: Scoring[_Rollout] = Scoring(trainer.score, settings.score_concurrency)
        # An environment is used again for the next batch, so its rewards must be had before that.
        self._score_beside = not deterministic and trainer.environment_factories is None
        self._failed_here: dict[int, float] = {}  # job that failed on this worker -> when (monotonic seconds)
        self._said: Counter[str] = Counter()  # what jobs failed with
        self._queue_s = 0.0  # spent on the queue since the last group was handed back
        self._server_died_at: float | None = None
        self.statistics = WorkerStatistics()
        self._progress = Progress(progress_file(run.root, queue.device))
        trainer.generator.on_step = self._between_tokens

    def work(self) -> None:
        """Serve jobs until the run has ended or the process was asked to stop."""
        with suppress(StopWorking):
            self._work()

    def _work(self) -> None:
        reminder = Reminder(self._waiting_for)
        while not self._stop and self._run_goes_on():
            claims = self._claim()
            if claims:
                self._serve(claims)
                reminder = Reminder(self._waiting_for)
            elif self._scoring.busy:
                self._publish_scored(timeout_s=SCORING_WAKE_S)
            else:
                reminder.tick()
                self._queue.wait(IDLE_WAKE_S, skip=self._better_left_to_others())

    def _claim(self) -> list[Claim]:
        if self._server_died_at is not None or self._scoring.backlog:
            return []
        started = time.monotonic()
        try:
            claims = self._queue.claim(self._share(), skip=self._better_left_to_others())
        except DiskFullError as error:  # a broken file could not be set aside; its job waits with us
            logger.warning("{} Waiting for room.", error)
            time.sleep(DISK_FULL_RETRY_S)
            return []
        if claims:
            self._queue_s += time.monotonic() - started
        return claims

    def _serve(self, claims: list[Claim]) -> None:
        started = time.monotonic()
        try:
            version = self._adopt(needed=max(claim.job.min_version for claim in claims))
        except (StopWorking, PeerDiedError):
            self._hand_back(claims)
            return
        except BaseException:  # no fault of the jobs: others may have them
            self._hand_back(claims)
            raise
        adopt_s = time.monotonic() - started
        self.statistics.add("weight adoption", adopt_s)
        try:
            started = time.monotonic()
            generated = self._generate(claims, version)
            generate_s = time.monotonic() - started
        except StopWorking:
            self._hand_back(claims)
            return
        except Exception:  # noqa: BLE001  # the user's tools run inside: whatever they raise belongs to the job
            self._serve_one_by_one(claims, traceback.format_exc())
            return
        self.statistics.add("generation", generate_s)
        share = Timings(adopt_s=adopt_s / len(claims), generate_s=generate_s / len(claims))
        for claim, group in zip(claims, generated, strict=True):
            self._score(_Rollout(claim, version, share), group)
        self._publish_scored(timeout_s=0)

    def _serve_one_by_one(self, claims: list[Claim], error: str) -> None:
        """A batch failed: find the job that is to blame, so that it costs only itself."""
        if len(claims) == 1:
            self._failed(claims[0], error)
        else:
            for claim in claims:
                self._serve([claim])

    def _generate(self, claims: list[Claim], version: int) -> list[GeneratedGroup]:
        self._trainer.state.global_step = version  # what a reward function sees as `trainer_state`
        try:
            if not self._deterministic:
                return self._generate_batch(claims)
            return [group for claim in claims for group in self._generate_batch([claim])]
        finally:
            self._policy.release()

    def _generate_batch(self, claims: list[Claim]) -> list[GeneratedGroup]:
        import torch

        first = claims[0].job
        torch.manual_seed(first.seed)
        return self._trainer.generate_groups([claim.job.row for claim in claims], first.num_generations)

    def _score(self, rollout: _Rollout, group: GeneratedGroup) -> None:
        if self._score_beside:
            self._scoring.start(rollout, group)
        else:
            from async_grpo.rollout.scoring import score_one

            self._publish(score_one(self._trainer.score, rollout, group))

    def _publish_scored(self, timeout_s: float) -> None:
        for outcome in self._scoring.finished(timeout_s):
            self._publish(outcome)

    def _publish(self, outcome: Scored[_Rollout]) -> None:
        """Hand a scored group back, or its job where scoring failed."""
        from async_grpo.rollout.group_records import to_record

        self._progress.tick()
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

    def _failed(self, claim: Claim, error: str) -> None:
        self.statistics.failed += 1
        self._failed_here[claim.job.seq] = time.monotonic()
        last_line = error.strip().rsplit("\n", 1)[-1]
        self._said[last_line] += 1
        level = "WARNING" if self._said[last_line] <= SAY_AT_MOST else "DEBUG"
        more = "; more of the same are not shown" if self._said[last_line] == SAY_AT_MOST else ""
        logger.log(level, "prompt group {} (attempt {}) failed: {}{}", claim.job.seq, claim.attempt, last_line, more)
        self._when_there_is_room(lambda: self._queue.fail(claim, error))

    def _when_there_is_room(self, write: Callable[[], None]) -> None:
        """Write to the queue; on a full disk keep the claim and wait until there is room."""
        reminder: Reminder | None = None
        while True:
            try:
                return write()
            except DiskFullError as error:
                if reminder is None:
                    reminder = Reminder(lambda: f"room on the disk of {self._run.root}")
                    logger.warning("{} Keeping the job and waiting for room.", error)
            if self._stop:
                raise StopWorking
            reminder.tick()
            self._progress.tick()
            time.sleep(DISK_FULL_RETRY_S)

    def _hand_back(self, claims: list[Claim]) -> None:
        for claim in claims:
            self._queue.hand_back(claim)

    def _adopt(self, needed: int) -> int:
        """Take on the newest weights, at least version `needed`; they stay readable until `release()`."""
        deadline = time.monotonic() + WEIGHTS_WAIT_S
        reminder = Reminder(lambda: f"version {needed} of the weights")
        while (version := self._policy.adopt(WEIGHTS_WAIT_S)) < needed:
            self._policy.release()
            if self._stop:
                raise StopWorking
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"Version {needed} of the weights did not appear in {WEIGHTS_WAIT_S:.0f} s.")
            _check_server(self._run)
            reminder.tick()
            self._progress.tick()  # waiting for the trainer is no hanging
            time.sleep(0.002)
        return version

    def _between_tokens(self) -> None:
        self._progress.tick()
        if self._stop:
            raise StopWorking

    def _share(self) -> int:
        """How many groups to claim: an even share of what is pending, and at most an even share of a batch."""
        if self._groups_per_claim is not None:
            return self._groups_per_claim
        workers = max(1, self._queue.alive_workers())
        fair = min(self._queue.pending(), self._groups_per_round)
        return max(1, math.ceil(fair / workers))

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


def _wait_for_run(run: RunDir) -> RunState:
    """The state of the live run in the directory, once there is one."""

    def live_run() -> RunState | None:
        state = run.read_state()
        return state if state is not None and state.state == runs.RUNNING and _server_lives(run) else None

    return wait_until(live_run, what=f"a parameter server in {run.root}", timeout_s=SERVER_WAIT_S)


def _server_lives(run: RunDir) -> bool:
    return KernelLock(run.lock).is_held()


def _check_server(run: RunDir) -> None:
    if not _server_lives(run):
        raise PeerDiedError(f"The parameter server of {run.root} is gone. Start it again with --resume.")
