"""The run's own records: one line a logging step in `metrics.jsonl`, and `summary.json` at the end."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from loguru import logger

from async_grpo.line_file import LineFile
from async_grpo.wording import eta


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
            logger.info("step {}/{} {}", step, self._total_steps, self._step_line(step, logs))
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
