"""Conclusions: a run's condition, and the side that holds it up, each in a sentence that says what to do about it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from async_grpo.errors import RunDirError
from async_grpo.formatting import counted
from async_grpo.queue.liveness import live_workers
from async_grpo.rundir.paths import FAILED, FINISHED, RUNNING, SERVER, STOPPED, RunDir, RunState, no_run
from async_grpo.rundir.summary import next_command
from async_grpo.status.processes import Processes
from async_grpo.telemetry.activity import BUSY_WORKER, ENDING, EVALUATING, LOADING, SCORING, STARTING, TRAINING, WAITING

DEAD = "dead"
LIVE = (STARTING, LOADING, TRAINING, EVALUATING, ENDING)  # a parameter server is alive or expected

TRAINER_WAITS = 0.15  # of the trainer's time: less is noise, and not worth another worker
WORKERS_IDLE = 0.15  # of the workers' time
LONG_ENOUGH_S = 5.0  # of training, to speak of a bottleneck


def state_of(run: RunDir) -> RunState:
    """The contents of `run.json`. `RunDirError` says why there is none."""
    state = run.read_state() if run.root.is_dir() else None
    if state is not None:
        return state
    if run.root.is_dir() and (waiting := live_workers(run.root)):
        names = ", ".join(worker.name for worker in waiting)
        raise RunDirError(
            f"{run.root} holds no run yet: {names} wait for a parameter server. Start one with the same --run-dir."
        )
    raise RunDirError(no_run(run.root))


# --- the condition


def condition(state: RunState, processes: Processes) -> str:
    """One of LIVE, or `dead`, or how the run has ended: `finished`, `stopped`, `failed`."""
    server = processes.server
    alive = server is not None and server.alive
    if state.state != RUNNING:
        return ENDING if alive else state.state
    if server is None:
        return STARTING
    if not alive:
        return DEAD
    if server.state in (STARTING, ENDING):
        return server.state
    record = processes.records[SERVER]
    if record.problems is not None:
        return EVALUATING
    return LOADING if record.step is None else TRAINING


def sentence(word: str, state: RunState, processes: Processes, run: RunDir) -> str:
    """The condition in words, and what to do about it."""
    workers, next_one = sum(worker.alive for worker in processes.workers), next_command(word, run)
    if word == DEAD:
        assert processes.server is not None
        waiting = f" {counted(workers, 'worker')} {'waits' if workers == 1 else 'wait'} for it to come back."
        return (
            f"the parameter server (pid {processes.server.pid}, last seen {processes.server.state}) was killed, or the "
            f"machine went down.{waiting if workers else ''} To continue from the last checkpoint: {next_one}"
        )
    at_work = "the run is training." if workers else f"the run has no live worker: {state.plan.way_to_workers}."
    return {
        STARTING: "the run is starting: no parameter server is alive yet. If none comes, start the run again.",
        LOADING: f"the parameter server is loading {state.plan.config.name}; workers load meanwhile, or wait for "
        "weights.",
        TRAINING: at_work,
        EVALUATING: at_work.replace("training", "evaluating a checkpoint"),
        ENDING: "the run is ending: the last checkpoint and the summary are written.",
        FINISHED: f"the run has finished.{_moved(state, run)} To see its curves: {next_one}",
        STOPPED: f"the run was stopped. To continue: {next_one}",
        FAILED: f"the run failed; the end of {run.server_log} says why. To continue: {next_one}",
    }[word]


def _moved(state: RunState, run: RunDir) -> str:
    here = not state.run_dir or Path(state.run_dir) == run.root.resolve()
    return "" if here else f" It ran in {state.run_dir}; this directory was moved, renamed or copied since."


# --- the bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the last minute, or of the time since training began."""

    window_s: float
    workers: int
    trainer_waits: float
    workers_busy: float  # mean over the workers; generating, scoring, adopting weights
    workers_scoring: float  # mean; the part in which only rewards were computed
    max_staleness: int | None
    on_cpu: bool
    by_hand: bool = False  # the processes of the run were started one by one


def measure(processes: Processes, *, by_hand: bool = False) -> Shares | None:
    """None until there are a few seconds of training to speak of."""
    records, now = processes.records, processes.now
    server = records.get(SERVER)
    at_work = [records[worker.name] for worker in processes.workers if worker.alive and worker.busy is not None]
    if server is None or server.step is None or not at_work:
        return None
    waits = server.share_of_last_minute([WAITING], now)
    if waits is None:
        return None

    def mean_share(states: Collection[str]) -> float:
        return round(fmean(record.share_of_last_minute(states, now) or 0.0 for record in at_work), 4)

    return Shares(
        window_s=min(now - server.minute_ago.at_s, 60.0),
        workers=len(at_work),
        trainer_waits=round(waits, 4),
        workers_busy=mean_share(BUSY_WORKER),
        workers_scoring=mean_share([SCORING]),
        max_staleness=server.max_staleness,
        on_cpu=server.device == "cpu",
        by_hand=by_hand,
    )


def bottleneck(processes: Processes, shares: Shares | None, state: RunState) -> str:
    """Name the side that holds the run up and what to change, or why that cannot be said yet."""
    if not any(worker.alive for worker in processes.workers):
        return f"no worker is alive: {state.plan.way_to_workers}"
    if processes.server is not None and processes.server.no_progress_s is not None:
        return "nothing moves: look at the processes that make no progress"
    if shares is None or shares.window_s < LONG_ENOUGH_S:
        return "training has only just begun: too early to say"
    return bottleneck_of(shares)


def bottleneck_of(shares: Shares) -> str:
    """`workers are the bottleneck: the trainer waited 41% of the last minute; add workers …`"""
    window = "the last minute" if shares.window_s >= 55 else f"the last {shares.window_s:.0f} s"
    waited = f"waited {shares.trainer_waits:.0%} of {window}"
    idle = 1.0 - shares.workers_busy
    more = "start another `async-grpo worker`" if shares.by_hand else "add workers (--num-workers)"
    if shares.trainer_waits < TRAINER_WAITS and idle < WORKERS_IDLE:
        return f"balanced: the trainer {waited}, and workers were busy {shares.workers_busy:.0%} of it"
    if shares.trainer_waits < TRAINER_WAITS:
        enough = max(1, math.ceil(shares.workers * shares.workers_busy))
        fewer = counted(enough, "worker") if shares.by_hand else f"--num-workers {enough}"
        advice = f"{fewer} would do" if enough < shares.workers else "more workers would not help"
        return f"the trainer is the bottleneck: it {waited}, and workers were idle {idle:.0%} of it; {advice}"
    if shares.workers_scoring > 0.5:
        return (
            f"reward functions are the bottleneck: the trainer {waited}, and workers spent "
            f"{shares.workers_scoring:.0%} of it waiting for them; if several calls may run at a time, raise "
            f"--score-concurrency (or say thread_safe = True of the functions); else {more}, or make them faster"
        )
    if idle > 0.4:
        bound = "" if shares.max_staleness is None else f" (now {shares.max_staleness})"
        return (
            f"trainer and workers take turns: the trainer {waited}, and workers were idle {idle:.0%} of it; "
            f"raise --max-staleness{bound} so that they work at the same time"
        )
    advice = f"{more} or raise --groups-per-claim"
    if shares.on_cpu:
        advice = f"shorten the completions, or {more} while cores are free"
    return f"workers are the bottleneck: the trainer {waited}; {advice}"
