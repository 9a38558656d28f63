"""Which side a run waits for, in one sentence with what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass

from async_grpo.activity import BUSY_WORKER, SCORING, SERVER, WAITING
from async_grpo.process_view import Processes

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
    return sentence(shares)


def sentence(shares: Shares) -> str:
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
