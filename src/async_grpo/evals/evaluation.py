"""One evaluation: the workers answer every problem at one policy version, through the queue that training uses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from async_grpo.evals.asking import Asking
from async_grpo.evals.estimators import Answers
from async_grpo.evals.eval_ledger import Evaluated, Judge, evaluated
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.queue import ServerQueue
from async_grpo.queue.server import FOR_EVALUATIONS
from async_grpo.records import Job, RolloutGroup, seed_from
from async_grpo.settings import TrainingSettings

OPEN_AT_A_TIME = FOR_EVALUATIONS  # problems; nobody issues more during an optimizer step


class Problem(NamedTuple):
    """A row of the evaluation data, as the workers get it, and the task that its figures count for."""

    row: dict[str, Any]
    task: str = ""


class Evaluation:
    """The problems of one evaluation, on their way. Call `look` until it returns the result.

    Args:
        version: the only version that workers can see until the end of the evaluation.
        replicates: n, completions a problem; `ks` are those of pass@k and the others.
        trainer_state: what reward functions see of the trainer.
        finished: groups that an earlier process left; those that answer a problem of this evaluation are used again.
    """

    def __init__(
        self,
        queue: ServerQueue,
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
        self._judge, self._problems = judge, problems
        self._run_id, self._replicates, self._sampling, self._ks, self._seed = run_id, replicates, sampling, ks, seed
        self._trainer_state = trainer_state or {}
        self._started = time.monotonic()
        self.answers: dict[int, Answers] = {}  # by problem
        self._asking = Asking(
            queue,
            len(problems),
            self._job,
            self._judged,
            purpose="eval",
            version=version,
            most_open=OPEN_AT_A_TIME,
            finished=[group for group in finished if group.job.sampling == sampling],
        )
        self.total, self.failed = self._asking.total, self._asking.failed  # problems

    @property
    def done(self) -> int:
        """Problems that are answered or have failed."""
        return self._asking.done

    def wait(self, should_stop: Callable[[], bool]) -> bool:
        """Look until `look` has a result; False where the process was asked to stop."""
        return self._asking.wait(should_stop)

    def look(self) -> Evaluated | None:
        """Take what is finished and issue more. The result, when every problem is answered or has failed."""
        if not self._asking.look():
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
            first_seq=self._asking.first_seq,
        )

    def _job(self, problem: int, seq: int) -> Job:
        row, task = self._problems[problem]
        return Job(
            run_id=self._run_id,
            seq=seq,
            row=row,
            num_generations=self._replicates,
            # The same for every version, so that versions differ by their weights.
            seed=seed_from(f"evaluation:{self._seed}:{problem}"),
            born_version=self.version,
            min_version=self.version,
            purpose="eval",
            sampling=self._sampling,
            task=task,
            trainer_state=self._trainer_state,
        )

    def _judged(self, problem: int, group: RolloutGroup) -> None:
        self.answers[problem] = self._judge.answers(group)


def say_what_is_evaluated(problems: Sequence[Problem], settings: TrainingSettings) -> None:
    """Say what the user may not expect: that there are evaluations, that there are none, or what is odd about them."""
    asked = settings.eval_every not in (0, TrainingSettings().eval_every)
    if asked and not problems:
        logger.warning("--eval-every: the setup file's trainer has no eval_dataset, so nothing is evaluated")
    if not problems or not settings.eval_every:
        return
    if not asked:
        logger.info(
            "the trainer has an eval_dataset, so the workers answer its {} {}every {} and at the end. --eval-every 0 "
            "turns this off",
            counted(len(problems), "problem"),
            "" if settings.no_eval_first else "before the first step, ",
            counted(settings.eval_every, "step"),
        )
    warn_of_duplicates(problems)


def warn_of_duplicates(problems: Sequence[Problem]) -> None:
    """Warn where a row of the evaluation data is there more than once."""
    different = {json.dumps(problem, sort_keys=True, default=repr) for problem in problems}
    if again := len(problems) - len(different):
        logger.warning(
            "{} of the {} problems of the eval_dataset are equal to an earlier one. Each counts as a problem of its "
            "own, so the intervals are too narrow: leave them out",
            again,
            len(problems),
        )
