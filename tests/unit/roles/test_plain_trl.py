"""Plain TRL with a run directory: which directories it takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.errors import RunDirError
from async_grpo.roles.plain_trl import PROGRESS, Progress, read_progress, train

TRAINER: Any = SimpleNamespace()  # nothing of it may be touched


def write(run_dir: Path, **values: Any) -> None:
    (run_dir / PROGRESS).write_text(json.dumps(values))


def test_progress_is_what_the_file_says(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    write(tmp_path, state="running", step=3, total_steps=9)
    assert read_progress(tmp_path) == Progress("running", 3, 9)
    write(tmp_path, state="running", step="three")
    with pytest.raises(RunDirError, match="Choose another --run-dir"):
        read_progress(tmp_path)


def test_a_killed_run_continues_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    output, seen = tmp_path / "output", []
    for step, state in ((9, "{}"), (10, "{}"), (20, '{"global_st'), (30, None)):
        (output / f"checkpoint-{step}").mkdir(parents=True)
        if state is not None:
            (output / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(output)),
        add_callback=lambda callback: None,
        train=lambda resume_from_checkpoint: seen.append(resume_from_checkpoint),
    )
    (tmp_path / "run").mkdir()
    train(trainer, tmp_path / "run")
    write(tmp_path / "run", state="running", step=31, total_steps=40)
    train(trainer, tmp_path / "run")
    assert seen == [None, str(output / "checkpoint-10")]


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
    write(tmp_path, state="running", step=9, total_steps=9)
    train(trainer, tmp_path)
    assert read_progress(tmp_path) == Progress("finished", 9, 9)


def test_another_run_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path, state="finished", step=9, total_steps=9)
    with pytest.raises(RunDirError, match="a run that has finished"):
        train(TRAINER, tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunDirError, match="holds a distributed run"):
        train(TRAINER, tmp_path)
