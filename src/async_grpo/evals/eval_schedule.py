"""When a run evaluates: before the first step, every N steps and at the end, each time at a version held still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from async_grpo.evals.eval_ledger import Evaluated, EvaluationLedger
from async_grpo.evals.evaluation import Evaluation
from async_grpo.formatting import counted
from async_grpo.log import logger


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
