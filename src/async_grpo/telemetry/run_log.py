"""`metrics.jsonl`, one line a logging step: the writer, with the step line of the log, and rates read from its end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from async_grpo.errors import BadFileError
from async_grpo.formatting import counted, eta
from async_grpo.log import logger
from async_grpo.rundir.files import LineFile
from async_grpo.rundir.reading import LineReader
from async_grpo.rundir.shape import is_number, shaped
from async_grpo.telemetry.entries import RESUMED, SET, Entries, Entry, TakenBack, happened, parse_entry, step_of

STEP = "STEP"  # level of the step lines: as severe as INFO
logger.level(STEP, no=logger.level("INFO").no)

WINDOW_S = 60.0  # that rates are over
TAIL_BYTES = 256 * 1024  # a minute of all but the fastest runs

# Each part with the metrics it needs; left out where one is missing. `*/NAME` is that metric of each task, in brackets.
StepLine = tuple[tuple[str, ...], ...]

TRAINING_LINE: StepLine = (
    ("reward {:.3f}{}", "reward", "*/reward"),
    ("vf_explained_var {:.2f}", "critic/vf_explained_var"),
    ("{:.0f} rollouts/s", "async/rollouts_per_second"),
    ("staleness {:.1f}", "async/staleness_mean"),
    ("loss {:+.3g}", "loss"),
    ("KL {:.2g}", "kl"),
    ("lr {:.3g}", "learning_rate"),
    ("grad norm {:.2g}", "grad_norm"),
    ("queue {:.0f}/{:.0f}/{:.0f}", "async/queue_pending", "async/queue_processing", "async/queue_complete"),
    ("trainer waits {:.0%}", "async/trainer_wait_fraction"),
    ("workers busy {:.0%}", "async/worker_busy_fraction"),
)
LEGEND = (
    "in step lines, staleness is in versions of the weights, and queue 16/4/8 is 16 prompt groups that wait for a "
    "worker, 4 that are with one, and 8 that are finished"
)
REPLAY_LINE: StepLine = (  # of the policy in training; the rewards and the queue's figures are those of the archive
    ("loss {:+.3g}", "loss"),
    ("clipped {:.1%}", "clip_ratio/region_mean"),
    ("clipped {:.1%}", "cispo_clip_ratio"),
    ("weights limited {:.1%}", "async/weight_changed_fraction"),
    ("KL to the sampler {:.2g}", "async/kl_to_sampler"),
    ("probability ratios {:.2f} to {:.2f}", "async/ratio_min", "async/ratio_max"),
)


_OF_TASKS = "*/"
_ACCURACY = "eval_rewards/accuracy/mean"  # of TRL's own evaluation
_QUOTED = ("step", "eval_version", "loss", "reward", _ACCURACY, SET)


class RunLog(LineFile):
    """Writes metrics and the step line, and remembers what the summary quotes.

    Args:
        path: `metrics.jsonl`; a resumed run appends to it.
    """

    def __init__(self, path: Path, line: StepLine = TRAINING_LINE) -> None:
        self._line = line
        self._total_steps = 0
        self._first_step: int | None = None
        self._first_step_at = 0.0
        self._last_shown: int | None = None
        self._quotes: dict[str, float] = {}
        super().__init__(path)
        self._earlier = self._logged_earlier(path)
        for entry in self._earlier:
            self._remember(entry)

    def _logged_earlier(self, path: Path) -> list[Entry]:
        """The entries from before the run was resumed. A line that a power cut broke costs its own figures only."""
        entries = Entries(path)
        found = happened(map(_of_the_summary, entries.news()))
        if entries.broken:
            number, reason = next(iter(entries.broken.items()))
            lines = counted(len(entries.broken), "line")
            logger.warning("{} of {} cannot be read and left out (line {}: {})", lines, path, number, reason)
        return found

    def training_begins(self, total_steps: int, step: int = 0) -> None:
        """Set how far the training goes, and from which step it continues: what was logged of later ones is void."""
        self._total_steps, self._last_shown = total_steps, step
        if self._line is TRAINING_LINE:
            logger.info(LEGEND)
        kept = [entry for entry in self._earlier if step_of(entry) <= step]
        if len(kept) < len(self._earlier):
            self.append(json.dumps({"step": step, "monotonic_s": round(time.monotonic(), 3), RESUMED: True}))
            self._quotes = {}
            for entry in kept:
                self._remember(entry)
        self._earlier = []

    def logged(self, step: int, logs: dict[str, Any], sampled_with: str = "") -> None:
        """One call of the trainer's `log`: a training step, an evaluation, or the closing totals.

        Args:
            sampled_with: how TRL samples in training, and in its own evaluation.
        """
        values = _json_values({**_evaluated_set(logs), **logs})
        self.append(json.dumps({"step": step, "monotonic_s": round(time.monotonic(), 3), **values}, default=str))
        self._remember(values)
        if "loss" in logs:
            self.step_done(step, logs)
        elif is_number(logs.get("eval_reward")):
            data = f" of {values[SET]}" if SET in values else ""
            how = sampled_with and f", sampled with {sampled_with}"
            logger.info("TRL's own evaluation{} at step {}: mean reward {:.3f}{}", data, step, logs["eval_reward"], how)

    def step_done(self, step: int, figures: Mapping[str, Any]) -> None:
        """The step line of an optimizer step, once: also of one that the trainer does not log."""
        if step == self._last_shown:
            return
        self._last_shown = step
        parts = [f"ETA {self._eta(step)}", *described(figures, self._line)]
        logger.log(STEP, "step {}/{} {}", step, self._total_steps, "  ".join(parts))

    def quotes(self) -> dict[str, float]:
        """The summary's figures about learning; only those that the run has."""
        return {name: round(value, 4) for name, value in self._quotes.items()}

    def _remember(self, logs: Mapping[str, Any]) -> None:
        if "loss" in logs and is_number(logs.get("reward")):
            self._quotes.setdefault("reward_first", logs["reward"])
            self._quotes["reward_last"] = logs["reward"]
        accuracy: Any = logs.get(_ACCURACY)
        before, after = (f"accuracy_{when}/{logs.get(SET, '')}".removesuffix("/") for when in ("before", "after"))
        if is_number(accuracy):
            self._quotes[after if before in self._quotes else before] = accuracy

    def _eta(self, step: int) -> str:
        if self._first_step is None:
            self._first_step, self._first_step_at = step, time.monotonic()
        if step == self._first_step:
            return "?"
        seconds_per_step = (time.monotonic() - self._first_step_at) / (step - self._first_step)
        return eta((self._total_steps - step) * seconds_per_step)


def _of_the_summary(item: Entry | TakenBack) -> Entry | TakenBack:
    """The part of an entry that the summary's figures need: a long run has many entries."""
    return item if isinstance(item, TakenBack) else {name: item[name] for name in _QUOTED if name in item}


def described(logs: Mapping[str, Any], line: StepLine) -> list[str]:
    """The parts of a line whose metrics are there."""
    parts = [(text, [_figure(logs, name) for name in names]) for text, *names in line]
    return [text.format(*figures) for text, figures in parts if None not in figures]


def _figure(logs: Mapping[str, Any], name: str) -> Any:
    """A metric; of `*/NAME` the text, which is empty without tasks."""
    if not name.startswith(_OF_TASKS):
        return logs.get(name)
    split = [(*logged.partition("/")[::2], value) for logged, value in logs.items()]
    of_tasks = [(task, value) for task, what, value in split if what == name.removeprefix(_OF_TASKS)]
    shown = [f"{task} {value:.2f}" for task, value in of_tasks if is_number(value)]
    return f" ({', '.join(shown)})" if shown else ""


def _json_values(logs: dict[str, Any]) -> dict[str, Any]:
    """Plain numbers; NaN and infinity, which JSON does not know, become null."""
    return {k: (float(v) if math.isfinite(v) else None) if isinstance(v, float) else v for k, v in logs.items()}


def _evaluated_set(logs: Mapping[str, Any]) -> dict[str, str]:
    """`SET`, where TRL has evaluated one of several datasets: transformers names the first of its times by it."""
    prefix = next((name.removesuffix("_runtime") for name in logs if name.endswith("_runtime")), "eval")
    return {SET: prefix.removeprefix("eval_")} if "eval_reward" in logs and prefix != "eval" else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates over the steps of the last minute, or over the last two steps where one takes longer."""

    window_s: float  # from the first of these steps until now
    steps_per_second: float
    rollouts_per_second: float | None
    reward: float | None  # of the last step
    staleness_mean: float | None
    staleness_max: float | None
    padding_fraction: float | None = None


def last_steps(path: Path, now: float, since: float) -> list[dict[str, Any]]:
    """The training steps that were logged in the last minute, oldest first, but at least two if there are two.

    Args:
        since: when the process that writes them began; lines of an earlier one are left out.
    """
    position = max(0, path.stat().st_size - TAIL_BYTES) if path.exists() else 0
    found: list[dict[str, Any]] = []
    lines: list[str] = []
    with suppress(BadFileError):
        lines += LineReader(path, position).new_lines()
    for entry in filter(None, map(_parse, reversed(lines))):  # the first one may be half a line
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
        padding_fraction=last.get("async/padding_fraction"),
        staleness_max=last.get("async/staleness_max"),
    )


def _mean_over_time(steps: list[dict[str, Any]], name: str) -> float | None:
    """The mean of a metric, each value weighted by the time since the step before."""
    total = weight = 0.0
    for before, step in pairwise(steps):
        if step.get(name) is not None:
            seconds = step["monotonic_s"] - before["monotonic_s"]
            total, weight = total + step[name] * seconds, weight + seconds
    return total / weight if weight else None


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = parse_entry(line)
        shaped(float, entry.get("monotonic_s"))
    except BadFileError:
        return None
    return entry if "loss" in entry else None
