"""TensorBoard's writer fails on a full disk, in a thread of its own: training and the curves continue."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from transformers import TrainerControl, TrainerState, TrainingArguments

from async_grpo.training.reporting import CurvesCallback


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_points_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    disk = SimpleNamespace(full=False)
    write = RecordWriter.write

    def write_if_there_is_room(self: RecordWriter, data: bytes) -> None:
        if disk.full:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", write_if_there_is_room)
    curves = CurvesCallback(tmp_path)
    arguments, control = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True), TrainerControl()
    for step in range(30):
        disk.full = 10 <= step < 20
        curves.on_log(arguments, TrainerState(global_step=step), control, logs={"loss": 1.0})
        time.sleep(0.01)  # for the writer's thread
    curves.on_train_end(arguments, TrainerState(), control)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    steps = {event.step for event in read.Scalars("train/loss")}
    assert set(range(9)) <= steps
    assert set(range(22, 30)) <= steps
    assert len(warnings) >= 1
    assert "no curves for TensorBoard until" in warnings[0]
