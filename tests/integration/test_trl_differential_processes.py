"""Two worker processes from the command line, and plain TRL on the same completions: what both log is equal.

With recipes that once were trained on something else than in TRL.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.archive.groups import FinishedGroups, UsedStep
from async_grpo.records import RolloutGroup
from async_grpo.rundir.reading import LineReader
from kit.compared_with_trl import largest_difference, own_names
from kit.in_process import training_logs
from kit.recorded_batches import replay_with_trl
from kit.runs import SETUP, command, finish
from kit.setups import audited_cases

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TESTS = Path(__file__).parents[1]


def train(folder: Path, setup: str, **env: str) -> None:
    """Train with two workers and fresh weights for each batch; the run's audit finds nothing wrong."""
    options = ("--distributed", "-n", "2", "--max-staleness", "0", "--deterministic")
    finish(folder, *options, setup=SETUP.parent / setup, TEST_EXTRA_PATH=str(TESTS), **env)
    with command("audit", "worker", cwd=folder) as audit:
        assert audit.wait() == 0, audit.output


def used_batches(run_dir: Path) -> list[list[RolloutGroup]]:
    """What the trainer took, batch by batch; a batch that serves several optimizer steps is there once."""
    steps = [entry for entry in FinishedGroups(run_dir).news() if isinstance(entry, UsedStep)]
    assert all(step.missing == 0 for step in steps)
    return [[found.group for found in step.groups] for step in steps]


def compare(run_dir: Path, get_trainer: Callable[..., Any]) -> None:
    """The training steps in `metrics.jsonl` and those of plain TRL, without what only the asynchronous run has."""
    plain = training_logs(replay_with_trl(get_trainer, used_batches(run_dir)))
    reference = [{name: as_in_json(value) for name, value in entry.items()} for entry in plain]
    entries = [json.loads(line) for line in LineReader(run_dir / "metrics.jsonl").new_lines()]
    names = own_names(reference[0])
    ours = [{name: entry[name] for name in entry if name in names} for entry in entries if "loss" in entry]
    largest_difference(ours, reference)


def as_in_json(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


@pytest.mark.parametrize("case", audited_cases.CASES)
def test_a_recipe_that_once_trained_on_something_else(case: str, tmp_path: Path, model_folder: str) -> None:
    train(tmp_path, "audited_cases.py", TEST_CASE=case, TEST_MODEL_FOLDER=model_folder)
    compare(tmp_path / "worker", audited_cases.make(case, tmp_path / "plain", model_folder))
