"""Trainers, asynchronous at staleness 0 and in plain TRL on the same completions: all that both log is equal."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from differential_rows import ROWS, row
from random_configurations import COVERING, padding_of, trainer_of
from trl import GRPOConfig, GRPOTrainer

from async_grpo.archive.groups import FinishedGroups, UsedStep
from async_grpo.setup import pieces
from kit import compared_with_trl
from kit.compared_with_trl import TOLERANCE, SamplerIsOld, comparable, largest_difference, run_as_trl_would
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import replay_with_trl
from kit.runs import audited, finish, logged
from kit.setups.random_model import build

DRAWN = int(os.environ.get("RANDOM_CONFIGURATIONS", "30"))
"""How many configurations the slow test draws; `make chaos` sets the variable, to 300 unless told otherwise."""


@pytest.fixture(autouse=True)
def every_piece_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CALLS", 0.0)


def in_place_of(method: Any, around: Any) -> Any:
    return lambda *args, **kwargs: around(method, *args, **kwargs)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_trains_as_trl_does(
    name: str, tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ROWS[name]
    for cls, method, around in row.patches:
        monkeypatch.setattr(cls, method, in_place_of(getattr(cls, method), around))
    get_trainer = row.builder(tmp_path, model_folder)
    trainer_class = row.changes.get("trainer_class", GRPOTrainer)
    own_rollouts = "rollout_func" in row.changes.get("given", {})
    if row.reply:
        run, plain = compared_with_trl.run_as_scripted_trl_would(get_trainer, row.reply, trainer_class)
    else:
        run = InProcessRun(get_trainer, fresh_every=3 if row.stale else 1, **row.options).train()
        told = row.stale or own_rollouts
        of_trl = type("Told", (SamplerIsOld, trainer_class), {}) if told else trainer_class
        plain = replay_with_trl(partial(get_trainer, trainer_class=of_trl), run.batches, own_rollouts=own_rollouts)
        largest_difference(*comparable(run, plain))
        taken = zip(run.batches, run.versions, strict=True)
        assert told or all(group.policy_version == version for batch, version in taken for group in batch)
        assert told or max(entry.get("async/logprob_mismatch", 0.0) for entry in run.logs) < TOLERANCE
    if "eval_strategy" not in row.changes:  # in plain TRL a script evaluates as well
        compared_with_trl.same_completions(run.trainer, plain)
    assert row.shows(run)


def test_the_comparison_sees_stale_groups(tmp_path: Path) -> None:
    """Plain TRL takes stale completions for fresh ones, so the comparison must fail: else it would show nothing."""
    get_trainer = row(max_steps=3).builder(tmp_path, "")
    run = InProcessRun(get_trainer, fresh_every=3).train()
    plain = replay_with_trl(get_trainer, run.batches)
    with pytest.raises(AssertionError, match="but TRL has"):
        largest_difference(*comparable(run, plain))


def compare(seed: int, folder: Path, model_folder: str) -> Any:
    run, _ = run_as_trl_would(trainer_of(seed, folder, model_folder), padding=padding_of(seed))
    return run.logs


@pytest.mark.parametrize("seed", COVERING)
def test_a_random_configuration_trains_as_trl_does(seed: int, tmp_path: Path, model_folder: str) -> None:
    assert compare(seed, tmp_path, model_folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*range(DRAWN)} - {*COVERING}))
def test_more_random_configurations_train_as_trl_does(seed: int, tmp_path: Path, model_folder: str) -> None:
    assert compare(seed, tmp_path, model_folder)


@pytest.mark.slow
def test_two_worker_processes_train_as_trl_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line. The rewards set signals, so each worker calls them in its main thread."""
    small_steps = {"adam_epsilon": 1e-3}  # as `kit.tiny_trainer` has it
    options = ("-n", "2", "--max-staleness", "0", "--deterministic")
    finish(tmp_path, *options, TEST_REWARD="signals", TEST_GRPO=json.dumps(small_steps))
    audited(tmp_path / "worker")
    steps = [entry for entry in FinishedGroups(tmp_path / "worker").news() if isinstance(entry, UsedStep)]
    monkeypatch.chdir(tmp_path / "worker")  # checkpoints are written

    def get_trainer(arguments: dict[str, Any]) -> GRPOTrainer:
        return build(partial(GRPOTrainer, **arguments), GRPOConfig, **small_steps)

    plain = training_logs(replay_with_trl(get_trainer, [[found.group for found in step.groups] for step in steps]))
    ours = [{name: it for name, it in entry.items() if name in plain[0]} for entry in logged(tmp_path / "worker")]
    assert len(ours) == 12 and largest_difference(ours, plain) < TOLERANCE
