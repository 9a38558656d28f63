"""The same trainer run by us and by plain TRL, on the same completions or by one script: what both log is compared."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from async_grpo.training.padding import exchanging
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import replay_with_trl
from kit.scripted import ScriptedEngine, ScriptedGenerator, writing
from kit.tiny_trainer import build_trainer
from kit.tools import TOOL_CALL

TOLERANCE = 5e-5  # float32 rounds otherwise on each kind of CPU: by up to 1.6e-5 in what was seen
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
            if mine is None or reference is None or not math.isfinite(reference):
                assert str(mine) == str(reference), f"{name}: {mine}, but TRL has {reference}"
                continue
            difference = abs(mine - reference) / max(1.0, abs(reference))
            assert difference <= tolerance, f"{name} of step {their_entry['step']}: {mine}, but TRL has {reference}"
            largest = max(largest, difference)
    return largest


def own_names(entry: dict[str, Any]) -> set[str]:
    """The names of a logged entry without ours."""
    return {name for name in entry if not name.startswith("async/")}


class SamplerIsOld(GRPOTrainer):
    """Plain TRL that is told to take for the old policy the one that sampled, as `bypass` does for stale groups."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        return {**output, "old_per_token_logps": output["sampling_per_token_logps"]}


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


def same_completions(ours: GRPOTrainer, theirs: GRPOTrainer) -> None:
    """What both have put into the table of completions, with what rewards logged and what was made of them."""
    mine, reference = ({name: _split(it) for name, it in trainer._logs.items()} for trainer in (ours, theirs))
    assert mine.keys() == reference.keys()
    for name, (texts, numbers) in reference.items():
        assert mine[name][0] == texts, name
        assert mine[name][1] == pytest.approx(numbers, abs=TOLERANCE, nan_ok=True), name


def equal_weights(one: Any, other: Any) -> bool:
    """Whether two models, or their state dicts, hold the same tensors, bit by bit."""
    ours, theirs = (it if isinstance(it, dict) else it.state_dict() for it in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _split(logged: Any) -> tuple[list[Any], list[float]]:
    """The values of a column, or of columns with their names, that are no floats, and those that are."""
    columns = [[name, *logged[name]] for name in sorted(logged)] if isinstance(logged, dict) else [logged]
    values = [value for column in columns for value in column]
    return [it for it in values if not isinstance(it, float)], [it for it in values if isinstance(it, float)]


def settings(output_dir: Path, given: dict[str, Any] | None = None, **changes: Any) -> Callable[..., GRPOTrainer]:
    """A `get_trainer()` that builds the same trainer each time; a test may add to its arguments.

    Args:
        given: arguments of the trainer, e.g. `peft_config`.
        changes: of the rest, as for `build_trainer`.
    """

    def get_trainer(arguments: dict[str, Any] | None = None, **more: Any) -> GRPOTrainer:
        return build_trainer(output_dir, arguments={**(given or {}), **(arguments or {})}, **{**changes, **more})

    return get_trainer


Reply = Callable[[str, int], str]

BAD_CALL = '<tool_call>\n{"name": "divide", "arguments": {}}\n</tool_call>'


def scripted(get_trainer: Callable[..., GRPOTrainer], reply: Reply) -> InProcessRun:
    return InProcessRun(get_trainer, engine=ScriptedEngine(ScriptedGenerator(reply))).train()


def run_as_scripted_trl_would(
    get_trainer: Callable[..., GRPOTrainer], reply: Reply, trainer_class: type[GRPOTrainer] = GRPOTrainer
) -> tuple[InProcessRun, GRPOTrainer]:
    """Run with a script in the place of the model, then plain TRL with the same script: all that they log is equal."""
    run = scripted(get_trainer, reply)
    plain: Any = get_trainer(trainer_class=type("Scripted", (SamplerIsOld, writing(reply, trainer_class)), {}))
    plain.train()
    largest_difference(run.logs, training_logs(plain))
    return run, plain


def calls_multiply(prompt: str, index: int) -> str:
    """Calls the tool in every second completion, and uses its result."""
    if "<tool_response>" in prompt:
        return "twelve"
    return f"let me see{TOOL_CALL}" if index % 2 == 0 else "eleven"
