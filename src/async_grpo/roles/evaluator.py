"""The server of `async-grpo evaluate`: publishes given weights, has the workers answer the problems, trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from async_grpo.archive.disk_space import retry_while_full
from async_grpo.archive.groups import FinishedGroups
from async_grpo.errors import UsageError
from async_grpo.evals.estimators import Answers
from async_grpo.evals.eval_ledger import EvaluationLedger, Judge, compare, sampling_in_words
from async_grpo.evals.evaluation import Evaluation, warn_of_duplicates
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.roles.answering import AnswerServer, rule_of
from async_grpo.rundir.files import write_json
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.setup.sampling import guidance_of

if TYPE_CHECKING:
    from trl import GRPOTrainer


def evaluate_all(server: AnswerServer) -> bool:
    """Evaluate the models one after the other into `evaluations.jsonl`; False if the process was asked to stop.

    A model's index in the plan's `models` is its version there. Finished groups of an earlier process are used again.
    """
    run, settings = server.run, server.plan.training
    samplings = _samplings(server.trainer, server.plan)
    begin = _beginning(server)
    evaluations: list[Evaluation] = []
    # Without earlier lines: all figures come from the groups again.
    with closing(EvaluationLedger(run.evaluations, server.state.run_id, resumed_from=-1)) as ledger:
        for version, model in enumerate(server.plan.models):
            server.weights.publish(version, model)
            for sampling in samplings:
                evaluation = begin(version, sampling)
                how = sampling_in_words(sampling)
                logger.info("evaluating {} on {}, with {}", model, counted(evaluation.total, "problem"), how)
                if not _finish(evaluation, ledger, server.should_stop):
                    return False
                evaluations.append(evaluation)
    if len(server.plan.models) == 2:
        half = len(samplings)
        pairs = zip(samplings, evaluations[:half], evaluations[half:], strict=True)
        differences = [
            {"sampling": sampling, "figures": _difference(ours.answers, theirs.answers, settings.evaluated_ks())}
            for sampling, ours, theirs in pairs
        ]
        retry_while_full(
            lambda: write_json(run.comparison, {"differences": differences}), should_stop=server.should_stop
        )
    return True


def _samplings(trainer: GRPOTrainer, plan: RunPlan) -> list[dict[str, Any]]:
    """How each model is sampled, one evaluation after the other: guided ones at the head's temperature, untruncated."""
    guidance = guidance_of(trainer)
    if guidance is None:
        if plan.etas:
            raise UsageError(
                f"--eval-eta: the trainer of {plan.config} is not guided. Return guided(trainer, …) from the setup "
                "file, or leave --eval-eta out."
            )
        return [plan.training.eval_sampling()]
    sampling = plan.training.eval_sampling(guidance.sampling)
    if sampling["top_p"] != 1 or sampling["top_k"] != 0:
        raise UsageError(
            f"{sampling_in_words(sampling)} with guidance: values are of the untruncated sampler: set top_p to 1 "
            "(--eval-top-p 1) and top_k to 0 (--eval-top-k 0), or leave both out."
        )
    if sampling["temperature"] not in (0, guidance.sampling["temperature"]):
        raise UsageError(
            f"--eval-temperature {sampling['temperature']}: the head has values of the sampler at temperature "
            f"{guidance.sampling['temperature']}. Give that, or 0 for greedy decoding, or leave it out."
        )
    return [{**sampling, "eta": eta} for eta in plan.etas or (guidance.sampling["eta"],)]


def _difference(ours: Mapping[int, Answers], theirs: Mapping[int, Answers], ks: Sequence[int]) -> dict[str, Any]:
    try:
        figures = compare(ours, theirs, ks=ks)
    except ValueError as error:
        logger.warning("there is no difference to tell: {}", error)
        figures = {}
    return {name: asdict(figure) for name, figure in figures.items()}


def _beginning(server: AnswerServer) -> Callable[[int, dict[str, Any]], Evaluation]:
    """Makes the evaluation of a version, sampled in a way, on the trainer's `eval_dataset`."""
    from async_grpo.roles.evaluations import evaluation_of, problems_of

    run, plan, trainer = server.run, server.plan, server.trainer
    problems = problems_of(trainer)
    if not problems:
        raise UsageError(
            f"The trainer of {plan.config} has no eval_dataset. Add eval_dataset=Dataset.from_list([...]) to the "
            "GRPOTrainer of its get_trainer(): rows like those of train_dataset, with problems that are not trained on."
        )
    warn_of_duplicates(problems)
    judge = Judge.of(trainer.reward_funcs, rule_of(server))
    finished = [found.group for found in FinishedGroups(run.root).evaluated()]
    more = {"run_id": server.state.run_id, "seed": trainer.args.seed, "finished": finished}
    return lambda version, sampling: evaluation_of(
        version, plan.training, server.queue, judge, problems, sampling=sampling, **more
    )


def _finish(evaluation: Evaluation, ledger: EvaluationLedger, should_stop: Callable[[], bool]) -> bool:
    """Wait for the result and keep it; False if the process was asked to stop."""
    if not evaluation.wait(should_stop):
        return False
    result = evaluation.look()
    assert result is not None
    ledger.add(result)
    retry_while_full(ledger.sync, should_stop=should_stop)
    return True
