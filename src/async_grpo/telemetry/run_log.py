"""The run's own records: one line a logging step in `metrics.jsonl`, and `summary.json` at the end."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from loguru import logger

from async_grpo.formatting import eta
from async_grpo.rundir.files import LineFile

STEP = "STEP"  # level of the step lines: as severe as INFO
logger.level(STEP, no=logger.level("INFO").no)


class RunLog:
    """Writes metrics and the step line, and remembers what the summary quotes.

    Args:
        path: `metrics.jsonl`; a resumed run goes on in it.
    """

    def __init__(self, path: Path) -> None:
        self._total_steps = 0
        self._started = time.monotonic()
        self._first_step: int | None = None
        self.reward_first: float | None = None
        self.reward_last: float | None = None
        self.accuracy_before: float | None = None
        self.accuracy_after: float | None = None
        self._file = LineFile(path)
        for line in path.read_text().splitlines():
            self._remember(json.loads(line))

    def training_begins(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def logged(self, step: int, logs: dict[str, Any]) -> None:
        """One call of the trainer's `log`: a training step, an evaluation, or the closing totals."""
        when = {"monotonic_s": round(time.monotonic(), 3)}
        self._file.append(json.dumps({"step": step, **when, **_json_values(logs)}, default=str))
        self._remember(logs)
        if _is_training_step(logs):
            if self._first_step is None:
                self._first_step, self._started = step, time.monotonic()
            logger.log(STEP, "step {}/{} {}", step, self._total_steps, self._step_line(step, logs))
        elif "eval_reward" in logs:
            logger.info("evaluation at step {}: reward {:.3f}", step, logs["eval_reward"])

    def close(self) -> None:
        self._file.close()

    def quotes(self) -> dict[str, float]:
        """The summary's figures about learning; only those that the run has."""
        named = {
            "reward_first": self.reward_first,
            "reward_last": self.reward_last,
            "accuracy_before": self.accuracy_before,
            "accuracy_after": self.accuracy_after,
        }
        return {name: round(value, 4) for name, value in named.items() if value is not None}

    def _remember(self, logs: dict[str, Any]) -> None:
        if _is_training_step(logs):
            self.reward_last = logs["reward"]
            self.reward_first = self.reward_last if self.reward_first is None else self.reward_first
        accuracy = logs.get("eval_rewards/accuracy/mean")
        if accuracy is None:
            return
        if self.accuracy_before is None:
            self.accuracy_before = accuracy
        else:
            self.accuracy_after = accuracy

    def _step_line(self, step: int, logs: dict[str, Any]) -> str:
        parts = [f"ETA {self._eta(step)}", f"reward {logs['reward']:.3f}"]
        shown = (
            ("async/rollouts_per_second", "{:.0f} rollouts/s"),
            ("async/staleness_mean", "staleness {:.1f}"),
        )
        parts += [text.format(logs[name]) for name, text in shown if logs.get(name) is not None]
        queue = [logs.get(f"async/queue_{state}") for state in ("pending", "processing", "complete")]
        if None not in queue:
            parts.append("queue " + "/".join(f"{count:.0f}" for count in queue))
        if logs.get("async/trainer_wait_fraction") is not None:
            parts.append(f"trainer waits {logs['async/trainer_wait_fraction']:.0%}")
        if logs.get("async/worker_busy_fraction") is not None:
            parts.append(f"workers busy {logs['async/worker_busy_fraction']:.0%}")
        return "  ".join(parts)

    def _eta(self, step: int) -> str:
        assert self._first_step is not None
        done = step - self._first_step
        if done == 0:
            return "?"
        return eta((self._total_steps - step) * (time.monotonic() - self._started) / done)


def _json_values(logs: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN and no infinity: they become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logs.items()}


def _is_training_step(logs: dict[str, Any]) -> bool:
    return "loss" in logs and logs.get("reward") is not None


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
