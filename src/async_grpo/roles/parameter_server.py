"""The parameter server process: trains on what the workers deliver, publishes every new policy, sums up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.errors import AsyncGRPOError, RunDirError, UsageError, reason_of
from async_grpo.evals.eval_ledger import before_and_after
from async_grpo.log import logger
from async_grpo.rundir import paths as runs
from async_grpo.rundir import summary
from async_grpo.rundir.files import write_json
from async_grpo.rundir.folder_watch import FolderWatch
from async_grpo.rundir.lifecycle import sole_user
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import SERVER, RunDir, RunState
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import TrainingSettings
from async_grpo.setup.devices import check_torch_sees
from async_grpo.setup.library_warnings import show_library_warnings
from async_grpo.setup.process import (
    StopRequest,
    gc_paused,
    log_to,
    make_deterministic,
    own_compile_cache,
    write_stacks_on_signal,
)
from async_grpo.setup.setup_file import load_trainer
from async_grpo.telemetry.activity import ENDING, LOADING, activity
from async_grpo.telemetry.ranks_file import write_ranks
from async_grpo.telemetry.stalls import StallReporter
from async_grpo.telemetry.trackers import name_for_wandb, name_run
from async_grpo.training.machines import Heartbeat

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo.training.distributed import Ranks
    from async_grpo.training.loop import AsyncTraining


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a parameter server, or the server of an evaluation, is started with. It sees the plan's device only."""

    run_dir: Path
    plan: RunPlan
    log_level: str | None = None  # of the log file in the run directory; None: a launcher keeps it
    rank: int = 0  # of the trainer's processes; rank 0 is the parameter server


def run_parameter_server(options: ServerOptions) -> str:
    """Train to the end in a prepared run directory; returns its last state, `finished` or `stopped`.

    Raises:
        AsyncGRPOError: with a text for the user. `run.json` and `summary.json` then say `failed`.
    """
    stop = StopRequest().install()
    if options.rank > 0:
        stop.defer()  # rank 0 gets the signal too, and decides when to end
        write_stacks_on_signal(RunDir(options.run_dir).stacks(f"rank{options.rank}"))
        return _follow(options, stop)
    run = RunDir(options.run_dir)
    with server_of(run, "parameter server") as (lock, state), FolderWatch(run.root).explained():
        return _serve(options, run, state, stop, lock)


@contextmanager
def server_of(run: RunDir, role: str) -> Iterator[tuple[KernelLock, RunState]]:
    """Be the server of a prepared run. `RunDirError`: the directory has another one, or holds no run."""
    with sole_user(run, role) as lock:
        state = run.read_state()
        if state is None:
            raise RunDirError(f"{run.root} holds no run: prepare one first.")
        with suppress(OSError):  # what a killed server has left: until there is another, this one is loading
            run.weights_handle.unlink()
        yield lock, state


def _serve(options: ServerOptions, run: RunDir, state: RunState, stop: StopRequest, lock: KernelLock) -> str:
    write_stacks_on_signal(run.stacks(SERVER))
    try:
        return _train(options, run, state, stop, lock)
    except BaseException as error:
        with suppress(AsyncGRPOError, OSError):  # the first error is the one to be told
            now = run.state_of(state.run_id)
            if now.undo:
                lock.require()
                run.take_back_resume(state.run_id)
            elif now.state == runs.RUNNING:  # it ended before there was a training to sum up
                result = runs.STOPPED if isinstance(error, SystemExit) else runs.FAILED
                _sum_up(run, lock, result, {"steps": now.step, "run_id": now.run_id})
            if not now.undo and not isinstance(error, SystemExit):
                run.update_state(of=state.run_id, why=reason_of(error))
        raise


def _train(options: ServerOptions, run: RunDir, state: RunState, stop: StopRequest, lock: KernelLock) -> str:
    started = time.monotonic()
    if options.log_level is not None:
        log_to(run.server_log, options.log_level)
    device, stall_s = options.plan.master_device, options.plan.training.stall_warning
    activity.publish(run.root, SERVER, device=device, run_id=state.run_id, state=LOADING, stall_after_s=stall_s)
    StallReporter(activity, run.root, stall_s).start()
    logger.info("parameter server on {}: loading {}", device, options.plan.config)
    show_library_warnings()
    failed, report = partial(run.note_failure, state.run_id), partial(write_ranks, run.ranks)
    heartbeat = Heartbeat.of_rank(stop=stop, failed=failed, report=report)
    with gc_paused():
        trainer = _load(options)
        from async_grpo.training.last_weights import keep_last_weights

    keep_last_weights(trainer, run, lambda: stop.requested)

    ranks = _ranks(trainer, heartbeat)
    try:
        training = training_of(trainer, run, state, options.plan.training, stop, ranks=ranks, lock=lock)
    except AsyncGRPOError:
        if ranks is not None:
            ranks.refused()
        raise
    with training:
        stop.defer()
        result = runs.FAILED
        try:
            result = runs.FINISHED if training.train() else runs.STOPPED
        finally:
            activity.doing(ENDING)
            with suppress(AsyncGRPOError, OSError) if result == runs.FAILED else nullcontext():
                figures = _figures(training, run, state, time.monotonic() - started)
                earlier = {} if training.has_trained else summary.read(run.summary)
                training.write_the_rest(
                    partial(_sum_up, run, lock, result, figures, earlier),
                    should_stop=lambda: stop.requested or result == runs.FAILED,
                )
    if ranks is not None:
        ranks.wait_for_all()  # one that left early would look as if it had died
        ranks.leave()
    return result


def training_of(
    trainer: GRPOTrainer,
    run: RunDir,
    state: RunState,
    settings: TrainingSettings,
    stop: StopRequest,
    *,
    ranks: Ranks | None = None,
    lock: KernelLock | None = None,
) -> AsyncTraining:
    """Compose the training of a prepared run with its evaluations and the versions that it keeps.

    Args:
        ranks: the other processes of the trainer.
        lock: the server's, where the caller holds it already.

    Raises:
        UnsupportedError, UsageError: the trainer or the settings cannot be trained this way.
    """
    from async_grpo.deltas.recorder import recorder_of
    from async_grpo.roles.evaluations import run_evaluations
    from async_grpo.training.assembly import Parts
    from async_grpo.training.companions import Companions
    from async_grpo.training.loop import AsyncTraining

    of_run = (trainer, run, state, settings)
    companions = Companions(evaluations=partial(run_evaluations, *of_run), version_keeper=partial(recorder_of, *of_run))
    parts = Parts(
        trainer, run=run, state=state, settings=settings, stop=stop, companions=companions, ranks=ranks, lock=lock
    )
    return AsyncTraining(parts)


def _follow(options: ServerOptions, stop: StopRequest) -> str:
    """Train as any rank but the parameter server's; returns when rank 0 has ended the training."""
    heartbeat = Heartbeat.of_rank(stop=stop)
    with gc_paused():
        trainer = _load(options)
        from async_grpo.training.distributed import Follower
        from async_grpo.training.last_weights import keep_last_weights
        from async_grpo.training.rollout_source import StopTraining

    ranks = _ranks(trainer, heartbeat)
    if ranks is None:
        raise UsageError(
            f"This process is rank {options.rank} of a distributed launch, but the trainer in {options.plan.config} "
            "spans one process only. Start it without `accelerate launch`."
        )
    keep_last_weights(trainer, RunDir(options.run_dir))
    with suppress(StopTraining):  # rank 0 refuses to train, and says why
        Follower(trainer, ranks, options.plan.training).train()
        ranks.wait_for_all()
    ranks.leave()
    return runs.FINISHED


def _load(options: ServerOptions) -> GRPOTrainer:
    own_compile_cache("parameter_server", os.environ)
    check_torch_sees(options.plan.master_device)
    settings = options.plan.training
    if settings.deterministic:
        make_deterministic()
    name_for_wandb(settings, os.environ)
    trainer = load_trainer(
        options.plan.config, engine_here=False, steps=settings.steps, seed=settings.seed, config_values=settings.set
    )
    name_run(trainer, settings)
    return trainer


def _ranks(trainer: GRPOTrainer, heartbeat: Heartbeat | None) -> Ranks | None:
    """The other processes of the trainer, None where it is alone."""
    if trainer.args.world_size == 1:
        return None
    from async_grpo.training.distributed import Ranks
    from async_grpo.training.trl_trainer import name_the_cpu

    name_the_cpu(trainer)
    return Ranks(heartbeat)


def _figures(training: AsyncTraining, run: RunDir, state: RunState, wall_s: float) -> dict[str, Any]:
    return {
        "steps": training.step,
        "wall_seconds": round(wall_s, 1),
        **training.metrics.totals(),
        **training.figures,
        **training.log.quotes(),
        **before_and_after(run.evaluations),
        "run_id": state.run_id,
        "checkpoints": str(training.output_dir),
        "tensorboard": str(training.curves()),
    }


def _sum_up(
    run: RunDir, lock: KernelLock, state: str, figures: dict[str, Any], earlier: Mapping[str, Any] = {}
) -> None:
    """Write `summary.json`, then `run.json`, which tells the workers that the run has ended.

    Args:
        earlier: the summary of the training, where a resume found nothing to do.

    Raises:
        AsyncGRPOError: another server has the directory by now, or another run is in it. Nothing was written.
    """
    lock.require()
    run.state_of(figures["run_id"])
    process = {"state": state, "server_pid": os.getpid(), "worker_restarts": 0}
    write_json(run.summary, {**process, **figures, **earlier, **process, "steps": figures["steps"]})
    run.update_state(of=figures["run_id"], state=state, step=figures["steps"])
