"""`metrics.jsonl` of a run that was resumed: every reader sees one row a step, the newest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from transformers import TrainerState, TrainingArguments

from async_grpo.api.notebook import Panel
from async_grpo.api.result import Result
from async_grpo.reports.board import Board
from async_grpo.telemetry import entries
from async_grpo.telemetry.run_log import RunLog
from async_grpo.training.reporting import CurvesCallback
from async_grpo_experiments.sweeps.plan import Run, Sweep
from async_grpo_experiments.sweeps.run_progress import curves
from kit.archived_run import ArchivedRun

HAPPENED = {1: 0.1, 2: 0.2, 3: 0.7}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArchivedRun:
    """Killed after step 4, resumed from the checkpoint of step 2, and at step 3 now."""
    run = ArchivedRun(tmp_path)
    first = RunLog(run.run.metrics)
    first.training_begins(6)
    for step in (1, 2, 3, 4):
        first.logged(step, {"loss": 0.5, "reward": step / 10})
        first.logged(step, {"eval_rewards/accuracy/mean": step / 100, "eval_version": step - 1})
    first.close()
    run.begin(2)
    return run


def resumed(run: ArchivedRun) -> RunLog:
    log = RunLog(run.run.metrics)
    log.training_begins(6, 2)
    log.logged(3, {"loss": 0.5, "reward": 0.7})
    return log


def from_result(run: ArchivedRun) -> dict[int, float]:
    table = Result(run.root).metrics
    return dict(zip(table["step"], table["reward"], strict=True))


def rewards_in(folder: Path) -> list[Any]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events.Tensors("train/reward")


def from_board(run: ArchivedRun) -> dict[int, float]:
    with Board(run.root) as board:
        board.update()
    found = [(event.step, make_ndarray(event.tensor_proto).item()) for event in rewards_in(run.run.board / "run")]
    assert len(found) == len(dict(found)), "one point a step"
    return {step: pytest.approx(value) for step, value in found}


def from_curves(run: ArchivedRun, tmp_path: Path) -> dict[int, float]:
    for name, reward in (("math", 0.25), ("code", 0.75)):  # as TRL evaluates a dictionary of datasets
        run.log(3, eval_set=name, eval_reward=reward)
    one = Run(Sweep(setup="s.py", seeds=(1,), name="mine", output_base=str(tmp_path / "outputs")), 0, 1)
    one.output.mkdir(parents=True)
    run.root.rename(one.run_dir)
    assert curves(one).evaluations == {3: {"math/reward_mean": 0.25, "code/reward_mean": 0.75}}
    return dict(curves(one).reward)


def test_every_reader_sees_one_row_a_step(run: ArchivedRun, tmp_path: Path) -> None:
    panel = Panel(run.root)
    panel._read()
    assert len(from_result(run)) == len(panel._rewards) == 4, "until it is resumed"
    log = resumed(run)
    assert log.quotes() == {"reward_first": 0.1, "reward_last": 0.7, "accuracy_before": 0.01, "accuracy_after": 0.03}
    log.close()
    panel._read()
    assert from_result(run) == from_board(run) == panel._rewards == HAPPENED
    assert from_curves(run, tmp_path) == HAPPENED


def test_the_file_keeps_everything_and_says_from_where_the_run_goes_on(run: ArchivedRun) -> None:
    before = run.run.metrics.read_bytes()
    resumed(run).close()
    added = run.run.metrics.read_bytes().removeprefix(before).splitlines()
    marker, step = map(json.loads, added)
    assert (marker["step"], marker["resumed"], step["step"]) == (2, True, 3)
    versions = [(one["step"], one.get("eval_version")) for one in entries.read(run.run.metrics)]
    assert versions == [(1, None), (1, 0), (2, None), (2, 1), (3, 2), (3, None)], "version 2 stays, with its evaluation"


def test_a_resume_that_repeats_nothing_writes_no_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "metrics.jsonl")
    log.logged(1, {"loss": 0.5})
    log.close()
    RunLog(tmp_path / "metrics.jsonl").training_begins(6, 1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_tensorboard_forgets_the_steps_that_are_trained_again(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True)
    for begin, steps in ((0, (1, 2, 3)), (1, (2,))):
        if begin:
            time.sleep(1)  # files are read by name: the second, then a number of the process without zeros in front
        callback = CurvesCallback(tmp_path / "tensorboard")
        state = TrainerState(global_step=begin, is_world_process_zero=True)
        control: Any = None
        callback.on_train_begin(arguments, state, control)
        for step in steps:
            state.global_step = step
            callback.on_log(arguments, state, control, logs={"reward": step + begin / 10})
        callback.on_train_end(arguments, state, control)
    assert [event.step for event in rewards_in(tmp_path / "tensorboard")] == [1, 2]
