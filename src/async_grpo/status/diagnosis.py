"""What condition a run is in: one word, and a sentence that says what to do about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import RunDirError
from async_grpo.formatting import counted
from async_grpo.queue.liveness import live_workers
from async_grpo.rundir.paths import FAILED, FINISHED, RUNNING, SERVER, STOPPED, RunDir, RunState
from async_grpo.rundir.summary import next_command
from async_grpo.status.processes import Processes
from async_grpo.telemetry.activity import BUSY_WORKER, ENDING, LOADING, SCORING, STARTING, TRAINING, WAITING

DEAD = "dead"  # the others are STARTING, LOADING, TRAINING and ENDING, and what run.json says of a run that has ended
LIVE = (STARTING, LOADING, TRAINING, ENDING)  # a parameter server is alive, or expected


def state_of(run: RunDir) -> RunState:
    """What `run.json` says. `RunDirError` says why there is none."""
    if not run.root.exists():
        raise RunDirError(f"{run.root} does not exist, so no run has begun there (yet). Name the run's --run-dir.")
    if not run.root.is_dir():
        raise RunDirError(f"{run.root} is a file. Name a run directory, such as worker/.")
    state = run.read_state()
    if state is not None:
        return state
    if (run.root / "alive").is_dir() and (waiting := live_workers(run.root)):
        names = ", ".join(worker.name for worker in waiting)
        raise RunDirError(
            f"{run.root} holds no run yet: {names} wait for a parameter server. Start one with the same --run-dir."
        )
    raise RunDirError(f"{run.root} is no run directory: it has no run.json. Name one, such as worker/.")


def condition(state: RunState, processes: Processes) -> str:
    """The word."""
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
    record = processes.records.get(SERVER)
    return TRAINING if record is not None and record.step is not None else LOADING


def sentence(word: str, state: RunState, processes: Processes, run: RunDir) -> str:
    """What the word means, and what to do about it."""
    server, workers = processes.server, sum(worker.alive for worker in processes.workers)
    if word == STARTING:
        return "no parameter server is alive yet. If none comes, what prepared this run has ended: start it again."
    if word == LOADING:
        return (
            f"the parameter server is loading {Path(state.config).name}; workers load meanwhile, or wait for weights."
        )
    if word == DEAD:
        assert server is not None
        waits = "waits" if workers == 1 else "wait"
        waiting = f" {counted(workers, 'worker')} {waits} for it to come back." if workers else ""
        return (
            f"the parameter server (pid {server.pid}, last seen {server.state}) is gone without a word: it was killed, "
            f"or the machine went down.{waiting} To go on from the last checkpoint: {next_command(STOPPED, run)}"
        )
    if word == FAILED:
        return f"the run failed; the end of {run.server_log} says why. To go on: {next_command(word, run)}"
    if word == STOPPED:
        return f"the run was stopped. To go on: {next_command(word, run)}"
    if word == FINISHED:
        return f"the run has finished. Next: {next_command(word, run)}"
    if word == ENDING:
        return "the run is ending: the last checkpoint and the summary are written."
    return "the run is training." if workers else "the run has no live worker: start one with `async-grpo worker`."


WAITS = 0.15  # of the trainer's time: less is noise, and not worth another worker
IDLE = 0.15  # of the workers' time
LONG_ENOUGH_S = 5.0  # of training, to speak of a bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the last minute, or since training began."""

    window_s: float
    workers: int
    trainer_waits: float
    workers_busy: float  # mean over the workers; generating, scoring, adopting weights
    workers_scoring: float  # mean; the part in which nothing but rewards was under way
    max_staleness: int | None
    on_cpu: bool


def measure(processes: Processes) -> Shares | None:
    """None until there are a few seconds of training to speak of."""
    records, now = processes.records, processes.now
    server = records.get(SERVER)
    if server is None or server.step is None:
        return None
    waits = server.share_of_last_minute([WAITING], now)
    at_work = [
        records[worker.name]
        for worker in processes.workers
        if worker.alive and worker.busy is not None and worker.name in records
    ]
    if waits is None or not at_work:
        return None
    busy = [record.share_of_last_minute(BUSY_WORKER, now) or 0.0 for record in at_work]
    scoring = [record.share_of_last_minute([SCORING], now) or 0.0 for record in at_work]
    return Shares(
        window_s=min(now - server.minute_ago.at_s, 60.0),
        workers=len(at_work),
        trainer_waits=round(waits, 4),
        workers_busy=round(sum(busy) / len(busy), 4),
        workers_scoring=round(sum(scoring) / len(scoring), 4),
        max_staleness=server.max_staleness,
        on_cpu=server.device == "cpu",
    )


def verdict(processes: Processes, shares: Shares | None) -> str:
    """The sentence, or why there is none yet."""
    if not any(worker.alive for worker in processes.workers):
        return "no worker is alive: start one with `async-grpo worker`"
    if processes.server is not None and processes.server.no_progress_s is not None:
        return "nothing moves: see who makes no progress"
    if shares is None or shares.window_s < LONG_ENOUGH_S:
        return "it has only just begun: too early to say"
    return bottleneck_sentence(shares)


def bottleneck_sentence(shares: Shares) -> str:
    """`workers are the bottleneck: the trainer waited 41% of the last minute; add workers …`"""
    window = "the last minute" if shares.window_s >= 55 else f"the last {shares.window_s:.0f} s"
    waited = f"the trainer waited {shares.trainer_waits:.0%} of {window}"
    idle = 1.0 - shares.workers_busy
    if shares.trainer_waits < WAITS:
        if idle < IDLE:
            return f"balanced: {waited}, and workers were busy {shares.workers_busy:.0%} of it"
        enough = max(1, math.ceil(shares.workers * shares.workers_busy))
        advice = f"--num-workers {enough} would do" if enough < shares.workers else "more workers would not help"
        return (
            f"the trainer is the bottleneck: it waited {shares.trainer_waits:.0%} of {window}, and workers were idle "
            f"{idle:.0%} of it; {advice}"
        )
    if shares.workers_scoring > 0.5:
        return (
            f"reward functions are the bottleneck: {waited}, and workers spent {shares.workers_scoring:.0%} of it "
            "waiting for them; raise --score-concurrency or --num-workers, or make them faster"
        )
    if idle > 0.4:
        bound = "" if shares.max_staleness is None else f" (now {shares.max_staleness})"
        return (
            f"trainer and workers take turns: {waited}, and workers were idle {idle:.0%} of it; "
            f"raise --max-staleness{bound} so that they work at the same time"
        )
    if shares.on_cpu:
        return (
            f"workers are the bottleneck: {waited}; shorten the completions, or add workers (--num-workers) "
            "while cores are free"
        )
    return f"workers are the bottleneck: {waited}; add workers (--num-workers) or raise --groups-per-claim"
