"""Which side a run waits for, in one sentence with what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass

WAITS = 0.15  # of the trainer's time: less is noise, and not worth another worker
IDLE = 0.15  # of the workers' time


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
