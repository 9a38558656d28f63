"""The problems of a run's evaluations: what is said of them before the first one."""

from __future__ import annotations

import json
from collections.abc import Sequence

from async_grpo.evals.evaluation import Problem
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.settings import TrainingSettings


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
