"""The last minute of a run from the end of its `metrics.jsonl`, however long the file is."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

WINDOW_S = 60.0
TAIL_BYTES = 256 * 1024  # a minute of all but the fastest runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the steps of the last minute say, or the last two steps where one takes longer."""

    window_s: float  # from the first of these steps until now
    steps_per_second: float
    rollouts_per_second: float | None
    reward: float | None  # of the last step
    staleness_mean: float | None
    staleness_max: float | None


def last_steps(path: Path, now: float, since: float) -> list[dict[str, Any]]:
    """The logged training steps of the last minute, oldest first; at least two, where there are two.

    `since`: when the process that writes them began; what an earlier one wrote is left out. A line that is written
    just now, and lines that are no JSON, are skipped.
    """
    found: list[dict[str, Any]] = []
    for line in reversed(_lines_from_end(path)):
        entry = _parse(line)
        if entry is None:
            continue
        when = entry["monotonic_s"]
        if when < since or when > now + WINDOW_S or (when < now - WINDOW_S and len(found) >= 2):
            break
        found.append(entry)
    return found[::-1]


def rates(steps: list[dict[str, Any]], now: float) -> Rates | None:
    """None until two steps are logged."""
    if len(steps) < 2:
        return None
    first, last = steps[0], steps[-1]
    window_s = now - first["monotonic_s"]
    in_time = max(1e-9, last["monotonic_s"] - first["monotonic_s"] if window_s > 2 * WINDOW_S else window_s)
    return Rates(
        window_s=window_s,
        steps_per_second=(last["step"] - first["step"]) / in_time,
        rollouts_per_second=_mean_over_time(steps, "async/rollouts_per_second"),
        reward=last.get("reward"),
        staleness_mean=last.get("async/staleness_mean"),
        staleness_max=last.get("async/staleness_max"),
    )


def _mean_over_time(steps: list[dict[str, Any]], name: str) -> float | None:
    """Each value weighed by the time since the step before."""
    total = weight = 0.0
    for before, step in pairwise(steps):
        if step.get(name) is not None:
            seconds = step["monotonic_s"] - before["monotonic_s"]
            total, weight = total + step[name] * seconds, weight + seconds
    return total / weight if weight else None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    is_step = isinstance(entry, dict) and "loss" in entry and isinstance(entry.get("step"), int)
    return entry if is_step and isinstance(entry.get("monotonic_s"), float) else None


def _lines_from_end(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")
    return lines[1 if size > TAIL_BYTES else 0 : -1]
