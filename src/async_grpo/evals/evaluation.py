"""One evaluation: the workers answer every problem at one policy version, through the queue that training uses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from loguru import logger

from async_grpo.errors import DiskFullError
from async_grpo.evals.estimators import Answers
from async_grpo.evals.report import Evaluated, Judge, evaluated
from async_grpo.queue import JobSink
from async_grpo.queue.server import FOR_EVALUATIONS, MAX_OPEN
from async_grpo.records import Job, RolloutGroup, seed_from

REASON_CHARACTERS = 300  # so that the line of an evaluation stays one that is read again
OPEN_AT_A_TIME = FOR_EVALUATIONS  # problems; nobody issues more during an optimizer step


class Problem(NamedTuple):
    """A row of the evaluation data, as the workers get it, and the task that its figures count for."""

    row: dict[str, Any]
    task: str = ""


class Evaluation:
    """The problems of one evaluation, on their way. Call `look` until it returns the result.

    Args:
        version: the only version that workers can see until the end of the evaluation.
        replicates: n, completions a problem.
        sampling: as `Job.sampling` has it.
        ks: of pass@k and the others.
        trainer_state: what reward functions see of the trainer.
        finished: groups that an earlier process left; those that answer a problem of this evaluation are used again.
    """

    def __init__(
        self,
        queue: JobSink,
        judge: Judge,
        problems: Sequence[Problem],
        *,
        run_id: str,
        version: int,
        replicates: int,
        sampling: dict[str, Any],
        ks: Sequence[int],
        seed: int,
        trainer_state: dict[str, Any] | None = None,
        finished: Iterable[RolloutGroup] = (),
    ) -> None:
        self.version = version
        self._queue, self._judge, self._problems = queue, judge, problems
        self._run_id, self._replicates, self._sampling, self._ks, self._seed = run_id, replicates, sampling, ks, seed
        self._trainer_state = trainer_state or {}
        self._started = time.monotonic()
        self._unissued = deque(range(len(problems)))
        self._first_seq = -1
        self._disk_full = False
        self._open: dict[int, int] = {}  # sequence number -> problem
        self.answers: dict[int, Answers] = {}  # by problem
        self.failed: dict[int, str] = {}
        by_seed = {group.job.seed: group for group in finished if group.policy_version == version}
        for problem in list(self._unissued):
            group = by_seed.get(problem_seed(seed, problem))
            if group is not None and self._is_answer(problem, group.job):
                self._unissued.remove(problem)
                self._came_back(problem, group)

    @property
    def total(self) -> int:
        """Problems."""
        return len(self._problems)

    @property
    def done(self) -> int:
        """Problems that are answered or have failed."""
        return len(self.answers) + len(self.failed)

    def look(self) -> Evaluated | None:
        """Take what is finished and issue more. The result, when every problem is answered or has failed."""
        try:
            self._collect()
            self._issue()
        except DiskFullError as error:  # the next look tries again; the trainer makes room
            if not self._disk_full:
                logger.warning("{} The evaluation of version {} waits for room.", error, self.version)
            self._disk_full = True
            return None
        self._disk_full = False
        if self._open or self._unissued:
            return None
        return evaluated(
            self.answers,
            self.failed,
            ks=self._ks,
            has_threshold=bool(self._judge.thresholds),
            run_id=self._run_id,
            step=self.version,
            seconds=round(time.monotonic() - self._started, 3),
            replicates=self._replicates,
            sampling=self._sampling,
            first_seq=self._first_seq,
        )

    def _issue(self) -> None:
        while self._unissued and len(self._open) < OPEN_AT_A_TIME and self._queue.open_jobs < MAX_OPEN:
            problem = self._unissued[0]
            job = self._job(problem, self._queue.new_seq())
            self._queue.submit(job)
            self._first_seq = job.seq if self._first_seq < 0 else self._first_seq
            self._open[job.seq] = self._unissued.popleft()

    def _job(self, problem: int, seq: int) -> Job:
        row, task = self._problems[problem]
        return Job(
            run_id=self._run_id,
            seq=seq,
            row=row,
            num_generations=self._replicates,
            seed=problem_seed(self._seed, problem),
            born_version=self.version,
            min_version=self.version,
            purpose="eval",
            sampling=self._sampling,
            task=task,
            trainer_state=self._trainer_state,
        )

    def _is_answer(self, problem: int, job: Job) -> bool:
        return job == self._job(problem, job.seq)

    def _collect(self) -> None:
        for name in self._queue.finished("eval"):
            problem = self._open.get(name.seq)
            group = self._queue.take(name)
            if group is not None and problem is not None:
                self._came_back(problem, group)
                del self._open[name.seq]
        for seq in [seq for seq in self._open if seq in self._queue.given_up]:
            self._failed(self._open.pop(seq), self._queue.given_up[seq].reason)

    def _came_back(self, problem: int, group: RolloutGroup) -> None:
        versions = {group.policy_version}
        if group.token_versions is not None:
            versions |= set(group.token_versions.tolist())
        if versions != {self.version}:
            self._failed(problem, f"it was answered by version {sorted(versions)}, not {self.version}")
            return
        try:
            self.answers[problem] = self._judge.answers(group)
        except Exception as error:  # noqa: BLE001  # `final_answer` is the user's
            self._failed(problem, f"{type(error).__name__}: {error}")

    def _failed(self, problem: int, reason: str) -> None:
        self.failed[problem] = reason.strip().rsplit("\n", 1)[-1][:REASON_CHARACTERS]


def problem_seed(seed: int, problem: int) -> int:
    """The seed of a problem's completions: the same for every version, so that versions differ by their weights."""
    return seed_from(f"evaluation:{seed}:{problem}")
