"""One evaluation: the workers answer every problem at one policy version, through the queue that training uses.

A run evaluates before the first step, every N steps and at the end, each time at a version held still.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from async_grpo.evals.asking import Asking
from async_grpo.evals.estimators import Answers
from async_grpo.evals.eval_ledger import Evaluated, EvaluationLedger, Judge, evaluated
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


class Holdable(Protocol):
    """Published weights that can be held at a version."""

    def hold(self) -> int | None:
        """Let nobody see a newer version until `release()`; returns the version that is seen now."""
        ...

    def release(self) -> None: ...


class RunEvaluations:
    """The evaluations of one run, one after the other.

    Args:
        begin: makes the evaluation of a version.
        every: optimizer steps between two of them; 0: none at all.
        first: whether there is one before the first step.
        report: called with each result, before the next version is published.
    """

    def __init__(
        self,
        weights: Holdable,
        ledger: EvaluationLedger,
        begin: Callable[[int], Evaluation],
        *,
        every: int,
        first: bool = True,
        report: Callable[[Evaluated], None],
    ) -> None:
        self._weights, self._ledger, self._begin = weights, ledger, begin
        self._every, self._report = every, report
        self._current: Evaluation | None = None
        begun = max(ledger.steps, default=-1 if first else 0)
        self._next_at = self._after(begun) if every else 0  # a version
        self._skipped = False
        self._done = 0

    @property
    def busy(self) -> bool:
        return self._current is not None

    @property
    def done(self) -> int:
        """Problems that were answered or have failed in all evaluations so far."""
        return self._done + (self._current.done if self._current is not None else 0)

    def describe(self) -> str:
        """What is being waited for, in words."""
        if self._current is None:
            return "no evaluation"
        return f"the evaluation of version {self._current.version} ({counted(self._current.done, 'problem')} done)"

    def published(self, version: int, *, last: bool = False) -> None:
        """Workers may see this version now: begin its evaluation if one is due.

        last: training is over, so this one is due in any case. None may be under way.
        """
        if not self._every or version in self._ledger.steps or not (last or version >= self._next_at):
            return
        if self._current is not None:
            self._say_skipped(version)
            return
        held = self._weights.hold()
        if held is None:
            return
        if held != version:  # it found no free slot; the next version will do
            self._weights.release()
            if last:
                logger.warning("the last version, {}, found no free slot: workers still read all older ones", version)
            return
        self._next_at = self._after(version)
        self._skipped = False
        self._current = self._begin(version)
        logger.info("evaluation of version {} on {}", version, counted(self._current.total, "problem"))
        self.look()

    def say_missing(self, version: int) -> None:
        """Training has ended with this version: warn where it has no evaluation, e.g. after Ctrl-C during the last."""
        if self._every and version not in self._ledger.steps:
            logger.warning(
                "the last version, {}, has no evaluation: the run ended before. To make up for it: async-grpo evaluate "
                "CHECKPOINT --config SETUP_FILE",
                version,
            )

    def look(self) -> None:
        """Go on with the evaluation that is under way, if there is one."""
        if self._current is None:
            return
        result = self._current.look()
        if result is None:
            return
        self._done += self._current.done
        self._current = None
        self._ledger.add(result)
        self._say(result)
        self._report(result)
        self._weights.release()

    def sync(self) -> None:
        """Every result is on the disk now. `DiskFullError` if there is no space for one."""
        self._ledger.sync()

    def close(self) -> None:
        """Drop the evaluation that is under way. The next server starts it again."""
        if self._current is not None:
            logger.info("the run ends during {}: it is dropped", self.describe())
            self._current = None
            self._weights.release()
        self._ledger.close()

    def _say_skipped(self, version: int) -> None:
        assert self._current is not None
        if not self._skipped:
            logger.warning(
                "the evaluation of version {} takes longer than {}: that of version {} is skipped. Evaluate less often "
                "(--eval-every), fewer problems, or fewer completions of each (--eval-replicates)",
                self._current.version,
                counted(self._every, "step"),
                version,
            )
        self._skipped = True
        self._next_at = self._after(version)

    def _after(self, version: int) -> int:
        """When the next evaluation is due."""
        return (version // self._every + 1) * self._every

    def _say(self, result: Evaluated) -> None:
        logger.info("evaluation of version {}: {}", result.step, result.in_words())
        for problem, reason in list(result.failed.items())[:3]:
            logger.warning("problem {} of the evaluation data could not be evaluated: {}", problem, reason)
        if result.failed:
            logger.warning(
                "{} could not be evaluated: the figures are those of the others", counted(len(result.failed), "problem")
            )
