"""The server of `async-grpo evaluate`: publishes given weights, has the workers answer the problems, trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from loguru import logger

from async_grpo.archive.groups import FinishedGroups
from async_grpo.archive.room import write_with_room
from async_grpo.errors import UsageError
from async_grpo.evals.estimators import Answers
from async_grpo.evals.evaluation import Evaluation
from async_grpo.evals.problems import warn_of_duplicates
from async_grpo.evals.report import EvaluationLedger, Judge, compare
from async_grpo.formatting import counted
from async_grpo.roles.answering import AnswerServer, rule_of, serve_answers
from async_grpo.roles.parameter_server import ServerOptions
from async_grpo.rundir.files import write_json


def run_evaluator(options: ServerOptions) -> None:
    """Evaluate each model in a prepared run directory; the results are in its `evaluations.jsonl`.

    A model's place in the plan's `models` is its version there. Finished groups of an earlier process are used again.

    Raises:
        AsyncGRPOError: with a text for the user. `run.json` then says `failed`.
    """
    serve_answers(options, "evaluation", _evaluate_all)


def _evaluate_all(server: AnswerServer) -> bool:
    """Evaluate the models one after the other; False if the process was asked to stop."""
    run, settings = server.run, server.plan.training
    begin = _beginning(server)
    evaluations: list[Evaluation] = []
    # Without earlier lines: all figures come from the groups again.
    with closing(EvaluationLedger(run.evaluations, server.state.run_id, resumed_from=-1)) as ledger:
        for version, model in enumerate(server.plan.models):
            server.weights.publish(version, model)
            evaluation = begin(version)
            logger.info("evaluating {} on {}", model, counted(evaluation.total, "problem"))
            if not _finish(evaluation, ledger, server.should_stop):
                return False
            evaluations.append(evaluation)
    if len(evaluations) == 2:
        ours, theirs = (evaluation.answers for evaluation in evaluations)
        difference = _difference(ours, theirs, settings.evaluated_ks())
        write_with_room(lambda: write_json(run.comparison, difference), should_stop=server.should_stop)
    return True


def _difference(ours: Mapping[int, Answers], theirs: Mapping[int, Answers], ks: Sequence[int]) -> dict[str, Any]:
    try:
        figures = compare(ours, theirs, ks=ks)
    except ValueError as error:
        logger.warning("there is no difference to tell: {}", error)
        figures = {}
    return {"figures": {name: asdict(figure) for name, figure in figures.items()}}


def _beginning(server: AnswerServer) -> Callable[[int], Evaluation]:
    """Makes the evaluation of a version on the trainer's `eval_dataset`."""
    from async_grpo.roles.evaluations import evaluation_of, problems_of

    run, plan, trainer = server.run, server.plan, server.trainer
    problems = problems_of(trainer)
    if not problems:
        raise UsageError(f"The trainer of {plan.config} has no eval_dataset. Give it one to evaluate on.")
    warn_of_duplicates(problems)
    judge = Judge.of(trainer.reward_funcs, rule_of(server))
    finished = [found.group for found in FinishedGroups(run.root).evaluated()]
    more = {"run_id": server.state.run_id, "seed": trainer.args.seed, "finished": finished}
    return lambda version: evaluation_of(version, plan.training, server.queue, judge, problems, **more)


def _finish(evaluation: Evaluation, ledger: EvaluationLedger, should_stop: Callable[[], bool]) -> bool:
    """Wait for the result and keep it; False if the process was asked to stop."""
    if not evaluation.wait(should_stop):
        return False
    result = evaluation.look()
    assert result is not None
    ledger.add(result)
    write_with_room(ledger.sync, should_stop=should_stop)
    return True
