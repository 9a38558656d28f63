"""The rollout worker process: claims jobs, adopts the newest weights, generates, scores, hands the groups back."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.engines.policy import WEIGHTS_WAIT_S
from async_grpo.errors import DiskFullError, PeerDiedError, RunRefused, UnsupportedError, WeightsError
from async_grpo.log import logger
from async_grpo.queue import WorkerQueue
from async_grpo.rollout.engine_choice import alone_on_the_gpu
from async_grpo.rollout.threads import ENDING_S, main_thread, wait_for_tasks
from async_grpo.rollout.worker import SERVER_WAIT_S, WEIGHTS_POLL_S, Worker, WorkerContext
from async_grpo.rundir import paths as runs
from async_grpo.rundir.folder_watch import FolderWatch
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import SERVER, RunDir, RunState
from async_grpo.rundir.refusal import write_refusal
from async_grpo.settings import WorkerSettings
from async_grpo.setup.devices import CPU, check_torch_sees
from async_grpo.setup.generated.trl_command import setup_file_of_run
from async_grpo.setup.library_warnings import show_library_warnings
from async_grpo.setup.overrides import check_overrides
from async_grpo.setup.process import (
    StopRequest,
    end_left_behind,
    gc_paused,
    leave_at_once,
    log_to,
    make_deterministic,
    own_compile_cache,
    write_stacks_on_signal,
)
from async_grpo.setup.setup_file import load_trainer
from async_grpo.telemetry.activity import ENDING, LOADING, activity
from async_grpo.telemetry.stalls import StallReporter
from async_grpo.telemetry.trainer_states import StateAt, StateReader
from async_grpo.telemetry.waiting import wait_until

if TYPE_CHECKING:
    from async_grpo.engines import Engine
    from async_grpo.rollout.trl_trainer import RolloutTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    run_dir: Path
    device: str  # "cpu" or a GPU index; the process already sees only this one
    worker_id: int | None = None  # None: the first free number
    config: Path | None = None  # None: the setup file of the parameter server
    settings: WorkerSettings
    log_level: str | None = None  # of the log file in the run directory; None: a launcher keeps it
    launched_by: int | None = None  # pid of the launcher, if one started the worker


def run_worker(options: WorkerOptions) -> None:
    """Work until the run ends or the process is asked to stop.

    Raises:
        AsyncGRPOError: no parameter server appeared, the setup file is broken, or the weights do not fit the model.
    """
    try:
        _work(options, StopRequest().install())
    finally:
        unfinished = wait_for_tasks(ENDING_S)
        if options.launched_by is not None and os.getpgrp() == os.getpid():  # its launcher may have been killed
            end_left_behind(os.getpid())
    if unfinished:
        logger.warning("the worker ends before its {}: not done in {:g} s", " and ".join(unfinished), ENDING_S)
        leave_at_once(0)


def _work(options: WorkerOptions, stop: StopRequest) -> None:
    run = RunDir(options.run_dir)
    StallReporter(activity, run.root, options.settings.stall_warning).start()
    state = _wait_for_run(run)
    with (
        FolderWatch(run.root).explained(),
        closing(WorkerQueue.open(run.root, options.worker_id, options.device)) as queue,
    ):
        _begin(options, run, state, queue)
        with gc_paused():
            trl = _load(options, run, state)
            from async_grpo_ipc import AttachError, IPCError, MismatchError

        try:
            _serve(trl, options, run, state, queue, stop)
        except RunRefused as error:
            with suppress(DiskFullError):  # the server then hears of it as of any worker that is gone
                write_refusal(run.root, queue.name, error)
            raise
        except (IPCError, PeerDiedError) as error:
            if run.has_ended():
                logger.info("worker {} ends: the run was over before it could join", queue.name)
            elif isinstance(error, PeerDiedError):
                raise
            else:
                for_good = isinstance(error, (AttachError, MismatchError))  # the next worker would find the same
                kind = UnsupportedError if for_good else WeightsError
                raise kind(f"The weights could not be adopted: {error}") from error


def _begin(options: WorkerOptions, run: RunDir, state: RunState, queue: WorkerQueue) -> None:
    """Make the process known, and set what has to be set before the trainer is loaded."""
    write_stacks_on_signal(run.stacks(queue.name))
    if options.log_level is not None:
        log_to(run.worker_log(queue.id), options.log_level)
    activity.publish(
        run.root,
        queue.name,
        device=options.device,
        run_id=state.run_id,
        state=LOADING,
        stall_after_s=options.settings.stall_warning,
    )
    own_compile_cache(queue.name, os.environ)
    show_library_warnings()
    logger.info("worker {} on {} serves run {} in {}", queue.name, options.device, state.run_id, run.root)
    check_torch_sees(options.device)
    if state.plan.training.deterministic:
        make_deterministic()


def _shares_gpu(options: WorkerOptions, state: RunState) -> bool:
    """Whether the launcher has put the worker on the server's GPU."""
    return options.device != CPU and options.device == state.plan.master_device


def _load(options: WorkerOptions, run: RunDir, state: RunState) -> RolloutTrainer:
    shares_gpu, training = _shares_gpu(options, state), state.plan.training
    has_engine = os.environ.get("FAST_INFERENCE") == "1"  # Unsloth starts one while it loads the model
    if shares_gpu and has_engine:
        _wait_for_weights(run)
    trainer = load_trainer(
        options.config or setup_file_of_run(state),
        engine_here=False,
        worker_of=state.plan.ranks,
        policy_on_cpu=shares_gpu,
        alone=alone_on_the_gpu(run, os.environ) if shares_gpu or has_engine else None,
        steps=training.steps,
        seed=training.seed,
        config_values=training.set,
    )
    from async_grpo.engines.policy import cast_parameters, without_weights
    from async_grpo.rollout.trl_trainer import RolloutTrainer

    check_overrides(trainer)  # of its own file, where it has one
    if shares_gpu:
        without_weights(trainer.model, trainer.accelerator.device)
    if training.publish_dtype == "bf16":
        cast_parameters(trainer.model)
    return RolloutTrainer(trainer, StateReader(run.trainer_states), partial(_wait_for_step, run))


def _wait_for_step(run: RunDir, ready: Callable[[], StateAt | None], what: str) -> StateAt:
    """The trainer may be evaluating what it trained in the step before, which takes long."""
    check_peer = partial(_check_server, run)
    return wait_until(
        ready, what=what, timeout_s=SERVER_WAIT_S, on=[SERVER], check_peer=check_peer, poll_s=WEIGHTS_POLL_S
    )


def _serve(
    trl: RolloutTrainer, options: WorkerOptions, run: RunDir, state: RunState, queue: WorkerQueue, stop: StopRequest
) -> None:
    from async_grpo.rollout.engine_choice import make_engine
    from async_grpo_ipc import open_remote_memory

    if _shares_gpu(options, state) and options.settings.server_devices is None:
        _wait_for_weights(run)  # an engine takes what is free: the server has its share by then
    engine = make_engine(trl, options.settings, run, state, worker=queue.id, on_gpu=options.device != CPU)
    try:
        _wait_for_weights(run)
        with open_remote_memory(run.weights_handle, timeout_s=WEIGHTS_WAIT_S) as weights:
            stop.defer()
            context = WorkerContext(
                trl=trl,
                queue=queue,
                weights=weights,
                run=run,
                should_stop=partial(_should_stop, options, run, state, stop),
                settings=options.settings,
                deterministic=state.plan.training.deterministic,
                check_run=partial(require_same_trainer, state, own_file=options.config is not None),
            )
            main_thread.serve_while(partial(_run_worker, context, engine, queue))
    finally:
        engine.end()


def _run_worker(context: WorkerContext, engine: Engine, queue: WorkerQueue) -> None:
    worker = Worker(context, engine)
    try:
        worker.run()
    finally:
        activity.doing(ENDING)
        logger.info("worker {} ends: {}", queue.name, worker.statistics.report())
        queue.hand_back_all()  # the main thread may not come to close the queue


def _should_stop(options: WorkerOptions, run: RunDir, state: RunState, stop: StopRequest) -> bool:
    """Whether the worker is to end, as a signal asked it to.

    The kernel sends one when the launcher dies, and to the server as well. The server of a deterministic run then still
    needs its workers, for the groups that only this version of the weights may sample, so they end after it.
    """
    if not stop.requested:
        return False
    is_orphan = options.launched_by is not None and os.getppid() != options.launched_by
    return not (state.plan.training.deterministic and is_orphan and server_alive(run.root))


def require_same_trainer(built_for: RunState, now: RunState, *, own_file: bool) -> None:
    """Raise `UnsupportedError` where a resume asks for another trainer than a worker of before has.

    Args:
        own_file: the worker's setup file is not the run's.
    """
    if now.undo is not None:  # no server has accepted it yet
        return
    before, after = ((plan.training.set, plan.training.publish_dtype) for plan in (built_for.plan, now.plan))
    if before != after or not (own_file or now.plan.config == built_for.plan.config):
        raise UnsupportedError(
            f"Run {now.run_id} was resumed with another setup file, or other values of --set or --publish-dtype, than "
            "this worker has loaded. Start the worker again."
        )


def _wait_for_weights(run: RunDir) -> None:
    """Until the server has loaded its model, and made the memory that it will publish in."""
    wait_until(
        lambda: run.weights_handle.exists() or None,
        what="weights from the parameter server",
        timeout_s=SERVER_WAIT_S,
        on=[SERVER],
        check_peer=lambda: _check_server(run),
    )


def _check_server(run: RunDir) -> None:
    if not server_alive(run.root):
        raise PeerDiedError(f"The parameter server of {run.root} is gone. Start it again with --resume.")


def _wait_for_run(run: RunDir) -> RunState:
    """The state of the live run in the directory, once there is one."""

    def live_run() -> RunState | None:
        state = run.read_state()
        return state if state is not None and state.state == runs.RUNNING and server_alive(run.root) else None

    return wait_until(live_run, what=f"a parameter server in {run.root}", timeout_s=SERVER_WAIT_S)
