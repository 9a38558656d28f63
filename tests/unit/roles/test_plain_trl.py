"""Plain TRL with a run directory: which directories it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.errors import DiskFullError, RunDirError
from async_grpo.roles import plain_trl
from async_grpo.roles.plain_trl import PROGRESS, PlainProgress, _reporter, held, read_progress, train
from async_grpo.rundir.paths import RunDir
from async_grpo.setup.process import StopRequest

TRAINER: Any = SimpleNamespace()  # nothing of it may be touched


def write(run_dir: Path, step: int, total_steps: int = 40, saved: int = 0, state: str = "running") -> None:
    run_dir.mkdir(exist_ok=True)
    values = {"state": state, "step": step, "total_steps": total_steps, "saved": saved}
    (run_dir / PROGRESS).write_text(json.dumps(values))


class Trains:
    """A trainer that keeps what it is resumed from."""

    def __init__(self, output: Path, **checkpoints: str | None) -> None:
        """`checkpoints`: by name, the state that is in each; `None`: it has none."""
        for name, state in checkpoints.items():
            (output / name).mkdir(parents=True)
            if state is not None:
                (output / name / "trainer_state.json").write_text(state)
        self.args, self.resumed = SimpleNamespace(output_dir=str(output)), list[str | None]()

    def add_callback(self, callback: object) -> None: ...

    def train(self, resume_from_checkpoint: str | None) -> None:
        self.resumed.append(resume_from_checkpoint and Path(resume_from_checkpoint).name)


def test_progress_is_what_the_file_says(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    write(tmp_path, 3, 9)
    assert read_progress(tmp_path) == PlainProgress("running", 3, 9, 0)
    (tmp_path / PROGRESS).write_text('{"state": "running", "step": "three"}')
    with pytest.raises(RunDirError, match="Choose another --run-dir"):
        read_progress(tmp_path)


def test_a_killed_run_continues_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    states = {"checkpoint-9": "{}", "checkpoint-10": "{}", "checkpoint-20": '{"global_st', "checkpoint-30": None}
    trainer = Trains(tmp_path / "output", **states)
    (tmp_path / "run").mkdir()
    train(trainer, tmp_path / "run")
    write(tmp_path / "run", 31, saved=30)
    train(trainer, tmp_path / "run")
    assert trainer.resumed == [None, "checkpoint-10"]


@pytest.mark.parametrize(
    ("error", "why"),
    [(RuntimeError("the reward\nis broken"), "RuntimeError: the reward is broken"), (SystemExit(0), "")],
)
def test_why_a_run_failed_is_written_down_and_a_stop_is_no_failure(
    error: BaseException, why: str, tmp_path: Path
) -> None:
    class Fails(Trains):
        def train(self, resume_from_checkpoint: object) -> None:
            write(tmp_path / "run", 3)
            raise error

    (tmp_path / "run").mkdir()
    with pytest.raises(type(error)):
        train(Fails(tmp_path), tmp_path / "run")
    assert read_progress(tmp_path / "run") == PlainProgress("running", 3, 40, 0, why)


def test_a_checkpoint_that_was_written_and_not_noted_counts_and_a_lost_one_is_said(tmp_path: Path) -> None:
    """With save_total_limit=1 the one before is gone by then."""
    trainer = Trains(tmp_path / "output", **{"checkpoint-20": "{}"})
    write(tmp_path / "run", 20, saved=10)
    train(trainer, tmp_path / "run")
    assert trainer.resumed == ["checkpoint-20"]
    write(tmp_path / "run", 21, saved=10)
    with pytest.raises(RunDirError, match="21 steps, but its checkpoint-10 is not in"):
        train(trainer, tmp_path / "run")


def test_a_run_that_was_killed_after_its_last_step_only_ends(tmp_path: Path) -> None:
    """transformers would train one step more from a checkpoint of the last."""
    args = SimpleNamespace(output_dir=str(tmp_path / "output"), load_best_model_at_end=False)
    state = SimpleNamespace(global_step=9, max_steps=9)
    callbacks: list[Any] = []
    trainer: Any = SimpleNamespace(args=args, state=state, control=None, add_callback=callbacks.append)

    def begin(resume_from_checkpoint: str | None) -> None:
        for callback in callbacks:
            callback.on_train_begin(args, state, None)
        pytest.fail("it trains")

    trainer.train = begin
    trainer.callback_handler = SimpleNamespace(on_train_end=lambda *given: callbacks[0].on_train_end(*given))
    write(tmp_path, 9, 9)
    train(trainer, tmp_path)
    assert read_progress(tmp_path) == PlainProgress("finished", 9, 9, 0)


@pytest.mark.parametrize(("saved", "expected"), [(5, "checkpoint-5"), (0, None)])
def test_checkpoints_of_another_run_in_the_same_folder_are_left_alone(
    saved: int, expected: str | None, tmp_path: Path
) -> None:
    trainer = Trains(tmp_path / "output", **{"checkpoint-5": "{}", "checkpoint-100": "{}"})
    write(tmp_path, 7, 200, saved=saved)
    train(trainer, tmp_path)
    assert trainer.resumed == [expected]


def test_what_it_has_saved_is_written_down_and_a_full_disk_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter: Any = _reporter(RunDir(tmp_path), StopRequest(), saved=0)
    control = SimpleNamespace()
    reporter.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=9), control)
    reporter.on_save(None, SimpleNamespace(global_step=4, max_steps=9), control)
    with monkeypatch.context() as full:
        full.setattr(plain_trl, "write_json", lambda *given: (_ for _ in ()).throw(DiskFullError("no room")))
        reporter.on_step_end(None, SimpleNamespace(global_step=5, max_steps=9), control)
        with pytest.raises(DiskFullError):
            reporter.on_train_end(None, SimpleNamespace(global_step=9, max_steps=9), control)
    assert read_progress(tmp_path) == PlainProgress("running", 4, 9, 4)


def test_one_process_trains_in_a_run_directory(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        begin = "import sys; from pathlib import Path; from async_grpo.roles.plain_trl import held\n"
        command = [sys.executable, "-c", begin + "with held(Path(sys.argv[1])): pass", tmp_path / "run"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Another process trains in" in said.stderr and f"process {os.getpid()} on" in said.stderr
    with held(tmp_path / "run"):
        pass


def test_another_run_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path, 9, 9, state="finished")
    with pytest.raises(RunDirError, match="a run that has finished"):
        train(TRAINER, tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunDirError, match="holds a distributed run"):
        train(TRAINER, tmp_path)
