"""The same trainer run by us and by plain TRL on the same completions: all that both log is compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from async_grpo.training.padding import exchanging
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import replay_with_trl
from kit.scripted import ScriptedEngine, ScriptedGenerator, writing
from kit.tiny_trainer import build_trainer

TOLERANCE = 1e-5
TIMES = ("step_time", "perf/time_per_step", "perf/throughput")  # no function of what was trained on
OF_MICRO_BATCHES = re.compile("entropy$|kl$|clip_ratio/|cispo_clip_ratio|vespo/")


def largest_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = TOLERANCE) -> float:
    """Between the logs of two runs, over all of TRL's metrics but times; relative where a value exceeds 1."""
    assert len(ours) == len(theirs) > 0
    largest = 0.0
    for our_entry, their_entry in zip(ours, theirs, strict=True):
        assert own_names(our_entry) == set(their_entry)
        for name in {name for name in their_entry if name not in TIMES and not name.startswith("timing_s/")}:
            mine, reference = our_entry[name], their_entry[name]
            if mine is None or reference is None:
                assert mine == reference, name
                continue
            difference = abs(mine - reference) / max(1.0, abs(reference))
            assert difference <= tolerance, f"{name} of step {their_entry['step']}: {mine}, but TRL has {reference}"
            largest = max(largest, difference)
    return largest


def own_names(entry: dict[str, Any]) -> set[str]:
    """The names of a logged entry without ours."""
    return {name for name in entry if not name.startswith("async/")}


def run_as_trl_would(
    get_trainer: Callable[..., GRPOTrainer], tolerance: float = TOLERANCE, **options: Any
) -> tuple[InProcessRun, GRPOTrainer]:
    """Run with fresh weights for each batch, then plain TRL on the same completions: all that they log is equal."""
    run = InProcessRun(get_trainer, **options).train()
    plain = replay_with_trl(get_trainer, run.batches)
    largest_difference(*comparable(run, plain), tolerance)
    return run, plain


def comparable(run: InProcessRun, plain: GRPOTrainer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What both have logged; without TRL's means over micro-batches, where the run's have other rows."""
    ours, theirs = run.logs, training_logs(plain)
    if exchanging(run.trainer) == 1:
        return ours, theirs
    left = [
        [{name: it for name, it in entry.items() if not OF_MICRO_BATCHES.match(name)} for entry in logs]
        for logs in (ours, theirs)
    ]
    return left[0], left[1]


def settings(output_dir: Path, given: dict[str, Any] | None = None, **changes: Any) -> Callable[..., GRPOTrainer]:
    """A `get_trainer()` that builds the same trainer each time; a test may add to its arguments.

    Args:
        given: arguments of the trainer, e.g. `peft_config`.
        changes: of the rest, as for `build_trainer`.
    """

    def get_trainer(arguments: dict[str, Any] | None = None, **more: Any) -> GRPOTrainer:
        return build_trainer(output_dir, arguments={**(given or {}), **(arguments or {})}, **{**changes, **more})

    return get_trainer


def plain_scripted(get_trainer: Callable[..., GRPOTrainer], reply: Callable[[str, int], str]) -> GRPOTrainer:
    trainer = get_trainer(trainer_class=writing(reply))
    trainer.train()
    return trainer


def scripted(get_trainer: Callable[..., GRPOTrainer], reply: Callable[[str, int], str]) -> InProcessRun:
    return InProcessRun(get_trainer, engine=ScriptedEngine(ScriptedGenerator(reply))).train()


def assert_same_counts(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """All metrics are equal that do not depend on the log-probabilities, which a script cannot know."""
    for mine, reference in zip(ours, theirs, strict=True):
        assert own_names(mine) == set(reference)
        for name, value in reference.items():
            if name.startswith(("reward", "completions/", "tools/", "num_tokens", "frac_reward")):
                assert mine[name] == pytest.approx(value), name
