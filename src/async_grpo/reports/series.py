"""Series of the board, by tag: of an optimizer step, of a line of `metrics.jsonl`, and of the settings.

TensorBoard sorts the groups of tags by name. Numbers bring what a person looks at first to the top: rewards, staleness,
throughput, evaluation. `docs/seeing.md` lists the tags.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.archive.groups import FinishedGroup, UsedStep
from async_grpo.formatting import as_text, printable
from async_grpo.redaction import MASK, Redactor, is_secret
from async_grpo.rundir.shape import is_number
from async_grpo.telemetry.entries import SET

REWARDS, STALENESS, THROUGHPUT, EVALUATION = "1_rewards", "2_staleness", "3_throughput", "4_evaluation"
COMPLETIONS, TIMING, WORKERS, DISTRIBUTIONS = "5_completions", "6_timing", "7_workers", "8_distributions"
STABILITY = "9_stability"

_redact = Redactor()
_NO_SERIES = ("eval_version", "step", "monotonic_s")  # of metrics.jsonl
_STABILITY = ("async/effective_sample_size", "async/ess_sequences", "async/kl_to_sampler")
_THROUGHPUT = ("async/rollouts_per_second", "async/trainer_wait_fraction", "async/worker_busy_fraction", "step_time")
_SAMPLE_CHARACTERS = 4000  # of a prompt or a completion that is shown as text


def scalars(used: UsedStep) -> dict[str, float]:
    """Numbers of a step's groups, of which there is at least one; NaN where there is nothing to tell."""
    groups = used.groups
    staleness = _staleness(used)
    ages = [used.version_used - found.group.job.born_version for found in groups]
    return {
        **_rewards(groups),
        f"{COMPLETIONS}/length": float(_lengths(groups).mean()),
        f"{STALENESS}/mean": float(staleness.mean()),
        f"{STALENESS}/max": float(staleness.max()),
        f"{TIMING}/job_age_versions": float(np.mean(ages)),
        **_seconds(groups),
    }


def histograms(used: UsedStep, rule: AdvantageRule) -> dict[str, NDArray[Any]]:
    """Histograms of the same groups: a value for each completion, and for each group its staleness."""
    totals = _totals(used.groups)
    advantages = rule.advantages([found.group.rewards for found in used.groups]) if rule.in_groups else []
    return {
        f"{DISTRIBUTIONS}/rewards": totals[~np.isnan(totals)],
        **({f"{DISTRIBUTIONS}/advantages": np.concatenate(advantages)} if advantages else {}),
        f"{DISTRIBUTIONS}/completion_length": _lengths(used.groups),
        f"{DISTRIBUTIONS}/staleness": _staleness(used),
    }


def samples(groups: Sequence[FinishedGroup]) -> dict[str, str]:
    """The completions with the highest and the lowest reward, as Markdown; none where nothing has a reward."""
    scored = [
        (total, found.group.job.seq, index, found)
        for found in groups
        for index, total in enumerate(found.totals.tolist())
        if not math.isnan(total)
    ]
    if not scored:
        return {}
    best, worst = max(scored, key=lambda it: it[:3]), min(scored, key=lambda it: it[:3])
    return {f"{COMPLETIONS}/best": _sample(best[3], best[2]), f"{COMPLETIONS}/worst": _sample(worst[3], worst[2])}


def of_workers(groups: Sequence[FinishedGroup]) -> dict[str, dict[str, float]]:
    """Scalars of each worker's groups, by its name."""
    names = sorted({found.group.worker for found in groups})
    return {name: _of_worker([found for found in groups if found.group.worker == name]) for name in names}


def logged(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The scalars of one line of metrics.jsonl: those of training under the tags that transformers gives them."""
    numbers = {name: float(value) for name, value in entry.items() if is_number(value) and name not in _NO_SERIES}
    evaluation = f"{EVALUATION}/{entry[SET]}" if SET in entry else EVALUATION
    for name, value in numbers.items():
        yield (f"{evaluation}/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"), value
    for group, names in ((THROUGHPUT, _THROUGHPUT), (STABILITY, _STABILITY)):
        for name in names:
            if name in numbers:
                yield f"{group}/{name.removeprefix('async/')}", numbers[name]
    rate, length = numbers.get("async/rollouts_per_second"), numbers.get("completions/mean_length")
    if rate is not None and length is not None:
        yield f"{THROUGHPUT}/tokens_per_second", rate * length


def hyperparameter_table(hyperparameters: dict[str, Any]) -> str:
    """Markdown; empty without any."""
    rows = [f"| {name} | {_redact(_cell(value))} |" for name, value in _without_secrets(hyperparameters)]
    return "\n".join(["| name | value |", "|---|---|", *rows]) if rows else ""


def hyperparameter_values(hyperparameters: dict[str, Any]) -> dict[str, bool | float | str]:
    """The settings by which runs are compared, under their own names; lists as text, and nothing that is not set."""
    values: dict[str, bool | float | str] = {}
    for name, value in _without_secrets(hyperparameters):
        if value is not None and value != {}:
            own_name = name.removeprefix("trainer.").removeprefix("run.")
            values[own_name] = value if isinstance(value, (bool, int, float)) else _redact(_cell(value))
    return values


def _without_secrets(hyperparameters: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Flat names and values."""
    for name, value in _flat(hyperparameters):
        yield name, MASK if is_secret(name.rpartition(".")[2], value) else value


# --- scalars


def _totals(groups: Sequence[FinishedGroup]) -> NDArray[np.float64]:
    return np.concatenate([found.totals for found in groups])


def _lengths(groups: Sequence[FinishedGroup]) -> NDArray[np.int32]:
    return np.concatenate([found.group.completion_lengths for found in groups])


def _staleness(used: UsedStep) -> NDArray[np.int64]:
    return np.array([used.version_used - found.group.policy_version for found in used.groups])


def _rewards(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """Means over the completions that have a reward."""
    by_name: dict[str, list[float]] = {}
    for found in groups:
        for index, name in enumerate(found.group.reward_names):
            by_name.setdefault(name, []).extend(found.group.rewards[:, index].tolist())
    named = {f"{REWARDS}/{name}": _mean(values) for name, values in by_name.items()}
    return {f"{REWARDS}/total": _mean(_totals(groups).tolist()), **named}


def _seconds(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """A worker's seconds for a group, in the mean."""
    spent = [found.group.timings for found in groups]
    return {
        f"{TIMING}/generation_s": _mean(times.generate_s for times in spent),
        f"{TIMING}/scoring_s": _mean(times.score_s for times in spent),
        f"{TIMING}/queue_s": _mean(times.queue_s for times in spent),
        f"{TIMING}/weights_s": _mean(times.adopt_s for times in spent),
    }


def _of_worker(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    spent = [found.group.timings for found in groups]
    generating = sum(times.generate_s for times in spent)
    busy = generating + sum(times.adopt_s + times.score_s + times.queue_s for times in spent)
    tokens = sum(int(found.group.completion_lengths.sum()) for found in groups)
    return {
        f"{WORKERS}/groups": float(len(groups)),
        f"{WORKERS}/seconds_per_group": busy / len(groups),
        f"{WORKERS}/tokens_per_generating_second": tokens / generating if generating else math.nan,
        f"{WORKERS}/reward": _mean(value for found in groups for value in found.totals.tolist()),
        f"{WORKERS}/staleness": _mean(found.staleness for found in groups if found.staleness is not None),
    }


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


# --- texts


def _sample(found: FinishedGroup, index: int) -> str:
    group = found.group
    rewards = ", ".join(
        f"{name} {reward:g}" for name, reward in zip(group.reward_names, group.rewards[index].tolist(), strict=True)
    )
    about = f"group {group.job.seq}, {group.worker}, version {group.policy_version}, {rewards}".replace("_", "\\_")
    prompt = as_text(group.prompt(index))
    completion = as_text(group.completions[index])
    return f"**prompt**\n\n{_fenced(prompt)}\n\n**completion** ({about})\n\n{_fenced(completion)}"


def _fenced(text: str) -> str:
    """Markdown that shows a text as it is: indented, so that nothing in it can end the block."""
    shown = printable(text[:_SAMPLE_CHARACTERS]) + (" …" if len(text) > _SAMPLE_CHARACTERS else "")
    return "\n".join(f"    {line}" for line in shown.split("\n"))


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _cell(value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value)).replace("\n", " ")
    return text.replace("|", "\\|")
