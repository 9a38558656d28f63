"""The evaluations of a run: the trainer's data and rewards, the queue and the published weights, put together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.credit.rarely_timed import RarelyTimed
from async_grpo.evals.eval_ledger import Evaluated, EvaluationLedger, Judge
from async_grpo.evals.evaluation import Evaluation, Holdable, Problem, RunEvaluations, say_what_is_evaluated
from async_grpo.queue import ServerQueue
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.training.hyperparameters import hyperparameters
from async_grpo.training.job_issuer import plain_fields
from async_grpo.training.prompts import evaluation_rows

if TYPE_CHECKING:
    from trl import GRPOTrainer


def run_evaluations(
    trainer: GRPOTrainer,
    run: RunDir,
    state: RunState,
    settings: TrainingSettings,
    queue: ServerQueue,
    weights: Holdable,
    resumed_from: int,
) -> RunEvaluations:
    """Make the evaluations of a training run on the trainer's `eval_dataset`; none where the run has none.

    Args:
        resumed_from: the step of the checkpoint that the run continues from, else 0.

    Raises:
        UsageError: the `eval_dataset` has no rows.
    """
    problems = problems_of(trainer) if settings.eval_every else []
    say_what_is_evaluated(problems, settings)
    judge = Judge.of(trainer.reward_funcs, AdvantageRule.from_record(hyperparameters(trainer, settings)))

    def begin(version: int) -> Evaluation:
        more = {
            "sampling": settings.eval_sampling(),
            "seed": trainer.args.seed,
            "trainer_state": plain_fields(trainer.state),
        }
        return evaluation_of(version, settings, queue, judge, problems, run_id=state.run_id, **more)

    ledger = EvaluationLedger(run.evaluations, state.run_id, resumed_from)
    every = settings.eval_every if problems else 0
    return RunEvaluations(
        weights, ledger, begin, every=every, first=not settings.no_eval_first, report=partial(log_evaluation, trainer)
    )


def evaluation_of(
    version: int, settings: TrainingSettings, queue: ServerQueue, judge: Judge, problems: Sequence[Problem], **more: Any
) -> Evaluation:
    """Begin the evaluation of a version, as the settings say. `more`: the other arguments of `Evaluation`."""
    return Evaluation(
        queue, judge, problems, version=version, replicates=settings.eval_replicates, ks=settings.evaluated_ks(), **more
    )


def problems_of(trainer: GRPOTrainer) -> list[Problem]:
    """Return the problems of the trainer's `eval_dataset`. `UsageError`: it has no rows."""
    return [Problem(row, task) for row, task in evaluation_rows(trainer)]


def log_evaluation(trainer: GRPOTrainer, result: Evaluated) -> None:
    """Report an evaluation through `report_to`: as `eval/pass@1`, and `eval/TASK/pass@1` for each task and source.

    Past TRL's own `log`, which would add the training metrics collected so far.
    """
    figures = {f"eval_{name}": figure.value for name, figure in result.figures.items()}
    for task, of_task in {**result.tasks, **result.sources}.items():
        figures |= {f"eval_{task}/{name}": figure.value for name, figure in of_task.items()}
    if figures:
        Trainer.log(trainer, {**figures, "eval_version": result.step})
    if isinstance(trainer, RarelyTimed):
        trainer.note_seconds("testing", result.seconds)
