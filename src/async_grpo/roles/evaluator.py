"""The server of `async-grpo evaluate`: publishes given weights, has the workers answer the problems, trains nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from loguru import logger

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.archive.groups import FinishedGroups
from async_grpo.archive.room import write_with_room
from async_grpo.errors import RunDirError, UsageError, WaitTimeoutError
from async_grpo.evals.estimators import Answers
from async_grpo.evals.evaluation import Evaluation
from async_grpo.evals.problems import warn_of_duplicates
from async_grpo.evals.report import EvaluationLedger, Judge, compare
from async_grpo.formatting import counted, eta
from async_grpo.queue import JobSink, ServerQueue
from async_grpo.roles.checkpoint_weights import load_weights, model_digest
from async_grpo.roles.parameter_server import ServerOptions, server_of
from async_grpo.rundir import paths as runs
from async_grpo.rundir.files import write_json
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import SERVER, RunDir, RunState
from async_grpo.rundir.reading import read_object
from async_grpo.settings import Way
from async_grpo.setup.devices import check_torch_sees
from async_grpo.setup.needs import check_needs
from async_grpo.setup.process import StopRequest, gc_paused, own_compile_cache, write_stacks_on_signal
from async_grpo.setup.setup_file import load_trainer
from async_grpo.telemetry.activity import ENDING, EVALUATING, LOADING, activity
from async_grpo.telemetry.stalls import StallReporter
from async_grpo.telemetry.waiting import Reminder, wait_until

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo_ipc import WeightExporter

PATIENCE_S = 1800.0  # without one answered problem
SAY_EVERY_S = 5.0
WAKE_S = 0.5


def run_evaluator(options: ServerOptions) -> None:
    """Evaluate each model in a prepared run directory; the results are in its `evaluations.jsonl`.

    A model's place in the plan's `models` is its version there. Finished groups of an earlier process are used again.

    Raises:
        AsyncGRPOError: with a text for the user. `run.json` then says `failed`.
    """
    stop = StopRequest().install()
    run, plan = RunDir(options.run_dir), options.plan
    write_stacks_on_signal(run.stacks(SERVER))
    with server_of(run, "evaluation") as (lock, state), _telling_how_it_ended(run):
        activity.publish(run.root, SERVER, device=plan.master_device, run_id=state.run_id, state=LOADING)
        StallReporter(activity, run.root, plan.training.stall_warning).start()
        own_compile_cache("parameter_server", os.environ)
        check_torch_sees(plan.master_device)
        with gc_paused():
            seed, values = plan.training.seed, plan.training.set
            trainer = load_trainer(plan.config, engine_here=False, seed=seed, config_values=values)
        if plan.num_workers:  # those that are started by hand may have another environment
            check_needs(trainer)
        stop.defer()
        run.update_state(of=state.run_id, undo=None)  # a resume is accepted
        done = _evaluate_all(options, run, state, trainer, stop, lock)
        activity.doing(ENDING)
        result = runs.FINISHED if done else runs.STOPPED
        write_with_room(lambda: run.update_state(state=result), should_stop=lambda: stop.requested)


@contextmanager
def _telling_how_it_ended(run: RunDir) -> Iterator[None]:
    """Write into `run.json` that the run was stopped or has failed, where the block raises; or undo a resume."""
    try:
        yield
    except BaseException as error:
        if run.read_state() is not None and not run.take_back_resume(None):
            run.update_state(state=runs.STOPPED if isinstance(error, SystemExit) else runs.FAILED)
        raise


def _evaluate_all(
    options: ServerOptions, run: RunDir, state: RunState, trainer: GRPOTrainer, stop: StopRequest, lock: KernelLock
) -> bool:
    """Evaluate the models one after the other; False if the process was asked to stop."""
    settings = options.plan.training
    begin = _beginning(options, run, state, trainer)
    ledger = EvaluationLedger(run.evaluations, state.run_id, resumed_from=-1)  # all figures come from the groups again
    evaluations: list[Evaluation] = []
    open_queue = partial(ServerQueue.open, run.root, state.run_id, max_attempts=settings.max_attempts, lock=lock)
    with closing(open_queue()) as queue, closing(ledger), _Weights(trainer, run, options.plan.weights) as weights:
        for version, model in enumerate(options.plan.models):
            weights.publish(version, model)
            evaluation = begin(queue, version)
            logger.info("evaluating {} on {}", model, counted(evaluation.total, "problem"))
            if not _finish(evaluation, queue, ledger, stop):
                return False
            evaluations.append(evaluation)
    if len(evaluations) == 2:
        ours, theirs = (evaluation.answers for evaluation in evaluations)
        difference = _difference(ours, theirs, settings.evaluated_ks())
        write_with_room(lambda: write_json(run.comparison, difference), should_stop=lambda: stop.requested)
    return True


def _difference(ours: Mapping[int, Answers], theirs: Mapping[int, Answers], ks: Sequence[int]) -> dict[str, Any]:
    try:
        figures = compare(ours, theirs, ks=ks)
    except ValueError as error:
        logger.warning("there is no difference to tell: {}", error)
        figures = {}
    return {"figures": {name: asdict(figure) for name, figure in figures.items()}}


def _beginning(
    options: ServerOptions, run: RunDir, state: RunState, trainer: GRPOTrainer
) -> Callable[[JobSink, int], Evaluation]:
    """Makes the evaluation of a version on the trainer's `eval_dataset`."""
    from async_grpo.roles.evaluations import evaluation_of, problems_of
    from async_grpo.training.hyperparameters import hyperparameters

    settings = options.plan.training
    problems = problems_of(trainer)
    if not problems:
        raise UsageError(f"The trainer of {options.plan.config} has no eval_dataset. Give it one to evaluate on.")
    warn_of_duplicates(problems)
    record = hyperparameters(trainer, settings)
    write_json(run.hyperparameters, record)
    judge = Judge.of(trainer.reward_funcs, AdvantageRule.from_record(record))
    finished = [found.group for found in FinishedGroups(run.root).evaluated()]
    more = {"run_id": state.run_id, "seed": trainer.args.seed, "finished": finished}
    return lambda queue, version: evaluation_of(version, settings, queue, judge, problems, **more)


class _Weights:
    """Publishes one model's weights after another's."""

    def __init__(self, trainer: GRPOTrainer, run: RunDir, way: Way) -> None:
        self._trainer, self._run, self._way = trainer, run, way
        self._exporter: WeightExporter | None = None

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._exporter is not None:
            self._exporter.close()

    def publish(self, version: int, model: str) -> None:
        """`RunDirError` where an earlier process evaluated other weights as this version."""
        from async_grpo_ipc import WeightExporter

        load_weights(self._trainer, model)
        self._require_same(str(version), model)
        if self._exporter is None:
            policy: Any = self._trainer.model
            self._exporter = WeightExporter.from_model(
                policy,
                self._run.weights_handle,
                slots=2,
                # Of adapters the base stays. Another model has other weights also where the setup file freezes them.
                frozen="static" if hasattr(policy, "peft_config") else "changing",
                way=self._way,
            )
        publish = self._exporter.publish
        wait_until(lambda: publish(version) or None, what="a free slot for the weights", timeout_s=PATIENCE_S)

    def _require_same(self, version: str, model: str) -> None:
        digest = model_digest(self._trainer.model)
        known = read_object(self._run.evaluated) if self._run.evaluated.exists() else {}
        before = known.setdefault(version, {"model": model, "weights": digest})
        if before["weights"] != digest:
            raise RunDirError(
                f"{self._run.root} holds the evaluation of {before['model']}, whose weights are not those of {model}. "
                "Choose another --run-dir."
            )
        write_json(self._run.evaluated, known)


def _finish(evaluation: Evaluation, queue: JobSink, ledger: EvaluationLedger, stop: StopRequest) -> bool:
    """Wait for the result and keep it; False if the process was asked to stop."""
    activity.doing(EVALUATING, version=evaluation.version)
    pace = _Pace(evaluation)
    with Reminder(lambda: f"answers from {counted(len(queue.workers()), 'worker')}") as reminder:
        while (result := evaluation.look()) is None:
            if stop.requested:
                return False
            pace.tell()
            reminder.tick()
            queue.wait(WAKE_S)
    pace.tell()
    ledger.add(result)
    write_with_room(ledger.sync, should_stop=lambda: stop.requested)
    return True


class _Pace:
    """How far an evaluation is: for the bar on the screen, a line now and then, and the end of patience."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._done, self._began_with = -1, evaluation.done  # answers of an earlier process took no time now
        self._began = self._progress_at = self._said_at = time.monotonic()

    def tell(self) -> None:
        """Call it after each look. `WaitTimeoutError` where nothing was answered for long."""
        now, done, total = time.monotonic(), self._evaluation.done, self._evaluation.total
        if done != self._done:
            self._done, self._progress_at = done, now
            activity.evaluates(answered=done, problems=total, eta_s=self._eta_s(now))
        elif now > self._progress_at + PATIENCE_S:
            raise WaitTimeoutError(f"Timed out after {PATIENCE_S:.0f} s waiting for an answered problem.")
        if now > self._said_at + SAY_EVERY_S:
            self._said_at = now
            left = self._eta_s(now)
            logger.info("{} of {} problems answered, ETA {}", done, total, "?" if left is None else eta(left))

    def _eta_s(self, now: float) -> float | None:
        answered = self._done - self._began_with
        return (self._evaluation.total - self._done) * (now - self._began) / answered if answered else None
