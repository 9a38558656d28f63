"""Random configurations over two worker processes from the command line, and plain TRL on the same completions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from compared_with_trl import largest_difference, own_names
from in_process import replay_with_trl, training_logs
from random_configurations import trainer_of
from runs import command, finish

from async_grpo.archive.groups import FinishedGroups, UsedStep
from async_grpo.records import RolloutGroup
from async_grpo.rundir.reading import LineReader

pytestmark = [pytest.mark.integration, pytest.mark.slow]

HERE = Path(__file__).parent
DRAWN = int(os.environ.get("DISTRIBUTED_CONFIGURATIONS", "6"))


def used_batches(run_dir: Path) -> list[list[RolloutGroup]]:
    """What the trainer took, batch by batch; a batch that serves several optimizer steps is there once."""
    steps = [entry for entry in FinishedGroups(run_dir).news() if isinstance(entry, UsedStep)]
    assert all(step.missing == 0 for step in steps)
    return [[found.group for found in step.groups] for step in steps]


def logged(run_dir: Path, names: set[str]) -> list[dict[str, Any]]:
    """The training steps in `metrics.jsonl`, without what only the asynchronous run has."""
    entries = [json.loads(line) for line in LineReader(run_dir / "metrics.jsonl").new_lines()]
    return [{name: entry[name] for name in entry if name in names} for entry in entries if "loss" in entry]


@pytest.mark.parametrize("seed", range(1000, 1000 + DRAWN))
def test_two_workers_train_a_random_configuration_as_trl_does(seed: int, tmp_path: Path, model_folder: str) -> None:
    options = ("--distributed", "-n", "2", "--max-staleness", "0", "--deterministic")
    env = {"TEST_DRAWN": str(seed), "TEST_MODEL_FOLDER": model_folder, "TEST_EXTRA_PATH": str(HERE)}
    finish(tmp_path, *options, setup=HERE / "setups" / "drawn_configuration.py", **env)
    with command("audit", "worker", cwd=tmp_path) as audit:
        assert audit.wait() == 0, audit.output
    plain = replay_with_trl(trainer_of(seed, tmp_path / "plain", model_folder), used_batches(tmp_path / "worker"))
    reference = training_logs(plain)
    largest_difference(logged(tmp_path / "worker", own_names(reference[0])), reference)
