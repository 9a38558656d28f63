"""What the servers of `evaluate` and `generate` share: they publish given weights, which workers answer with.

Nothing is trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.archive.disk_space import retry_while_full
from async_grpo.errors import RunDirError
from async_grpo.queue import ServerQueue
from async_grpo.roles.checkpoint_weights import load_weights, model_digest
from async_grpo.roles.parameter_server import ServerOptions, server_of
from async_grpo.rundir import paths as runs
from async_grpo.rundir.files import write_json
from async_grpo.rundir.paths import SERVER, RunDir, RunState
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import Way
from async_grpo.setup.devices import check_torch_sees
from async_grpo.setup.needs import check_needs
from async_grpo.setup.process import StopRequest, gc_paused, own_compile_cache, write_stacks_on_signal
from async_grpo.setup.setup_file import load_trainer
from async_grpo.telemetry.activity import ENDING, LOADING, activity
from async_grpo.telemetry.stalls import StallReporter
from async_grpo.telemetry.waiting import wait_until

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo_ipc import WeightExporter

SLOT_WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class AnswerServer:
    """What answers are asked for with."""

    run: RunDir
    plan: RunPlan
    state: RunState
    trainer: GRPOTrainer
    queue: ServerQueue
    weights: PublishedModels
    should_stop: Callable[[], bool]


def rule_of(server: AnswerServer) -> AdvantageRule:
    """How the rewards of a completion are added up; `hyperparameters.json` has it from now on."""
    from async_grpo.training.hyperparameters import hyperparameters

    record = hyperparameters(server.trainer, server.plan.training)
    write_json(server.run.hyperparameters, record)
    return AdvantageRule.from_record(record)


def serve_answers(options: ServerOptions, role: str, work: Callable[[AnswerServer], bool]) -> None:
    """Be the server of a prepared run for as long as `work` lasts, which is False if it was asked to stop.

    Raises:
        AsyncGRPOError: with a text for the user. `run.json` then says `failed`.
    """
    stop = StopRequest().install()
    run, plan = RunDir(options.run_dir), options.plan
    write_stacks_on_signal(run.stacks(SERVER))
    with server_of(run, role) as (lock, state), _telling_how_it_ended(run):
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
        attempts = plan.training.max_attempts
        with (
            closing(ServerQueue.open(run.root, state.run_id, max_attempts=attempts, lock=lock)) as queue,
            PublishedModels(trainer, run, plan.weights) as weights,
        ):
            done = work(AnswerServer(run, plan, state, trainer, queue, weights, lambda: stop.requested))
        activity.doing(ENDING)
        result = runs.FINISHED if done else runs.STOPPED
        retry_while_full(lambda: run.update_state(state=result), should_stop=lambda: stop.requested)


@contextmanager
def _telling_how_it_ended(run: RunDir) -> Iterator[None]:
    """Write into `run.json` that the run was stopped or has failed, where the block raises; or undo a resume."""
    try:
        yield
    except BaseException as error:
        if run.read_state() is not None and not run.take_back_resume(None):
            run.update_state(state=runs.STOPPED if isinstance(error, SystemExit) else runs.FAILED)
        raise


class PublishedModels:
    """Publishes one model's weights after another's."""

    def __init__(self, trainer: GRPOTrainer, run: RunDir, way: Way) -> None:
        self._trainer, self._run, self._way = trainer, run, way
        self._exporter: WeightExporter | None = None

    def __enter__(self) -> PublishedModels:
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
        wait_until(lambda: publish(version) or None, what="a free slot for the weights", timeout_s=SLOT_WAIT_S)

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
