"""A checkpoint, what a run writes at its end, and TensorBoard's curves on a full disk."""

from __future__ import annotations

import time
from collections.abc import Container
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from transformers import TrainerControl, TrainerState, TrainingArguments

from async_grpo.archive import disk_space, rollout_state
from async_grpo.errors import DiskFullError, PeerDiedError
from async_grpo.settings import ArchiveLimit
from async_grpo.training.checkpoints import UsedGroups
from async_grpo.training.reporting import CurvesCallback


def test_waits_until_there_is_space_and_makes_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10, 10, 200])
    asked: list[str] = []
    monkeypatch.setattr(disk_space, "RETRY_S", 0.0)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda folder: SimpleNamespace(free=next(free)))
    disk_space.wait_for_space(tmp_path, 100, make_space=lambda: asked.append("made"), should_stop=lambda: False)
    assert asked == ["made"]
    assert next(free, None) is None


def test_a_run_that_is_to_stop_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    disk_space.wait_for_space(tmp_path, 100, make_space=lambda: pytest.fail("nobody waits"), should_stop=lambda: True)


@pytest.mark.parametrize(
    ("free", "error", "told"),
    [
        (99, SafetensorError("I/O error: No space left on device"), True),
        (99, DiskFullError("no room for a line"), True),
        (99, PeerDiedError("a rank is gone"), False),
        (100, SafetensorError("another error"), False),
    ],
)
def test_a_checkpoint_that_found_no_space_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, error: Exception, told: bool
) -> None:
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    says = r"checkpoint-4 was not written\. It takes about 100 bytes, and 99 bytes are free in /.*--resume"
    with pytest.raises(DiskFullError if told else type(error), match=says if told else str(error)):
        with disk_space.said_if_full(tmp_path, 100, "checkpoint-4"):
            raise error


class Disk:
    """Full until space was made as often as it takes."""

    def __init__(self, takes: int) -> None:
        self.takes, self.writes = takes, 0

    def make_space(self) -> None:
        self.takes -= 1

    def write(self) -> None:
        self.writes += 1
        if self.takes > 0:
            raise DiskFullError("The disk is full: no room for run.json.")


@pytest.mark.parametrize("takes", [0, 1, 3])
def test_a_write_is_tried_until_there_is_space(takes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "RETRY_S", 0.0)
    disk = Disk(takes)
    disk_space.retry_while_full(disk.write, make_space=disk.make_space, should_stop=lambda: False)
    assert (disk.takes, disk.writes) == (0, takes + 1)


def test_a_run_that_is_to_stop_makes_space_once_and_says_what_it_could_not_write() -> None:
    disk = Disk(2)
    with pytest.raises(DiskFullError, match=r"run\.json"):
        disk_space.retry_while_full(disk.write, make_space=disk.make_space, should_stop=lambda: True)
    assert disk.takes == 1


@pytest.mark.parametrize(("resumed", "removed"), [(False, []), (True, [0, 1, 3])])
def test_a_resumed_run_makes_space_before_its_first_checkpoint(
    tmp_path: Path, resumed: bool, removed: list[int]
) -> None:
    used = {"unusable": [], "consumed_below": 2, "consumed": [3]}
    state = rollout_state.RolloutState(run_id="r", step=1, next_seq=5, rounds=1, **used)
    asked: list[Container[int]] = []
    queue = SimpleNamespace(trim_done=lambda keep, consumed: asked.append(consumed) or keep)
    groups = UsedGroups(queue, tmp_path, ArchiveLimit(1000), state if resumed else None)
    groups.make_space(Path("/proc"))  # is on another disk, which these groups do not fill
    groups.make_space(tmp_path)
    [consumed] = asked
    assert [seq for seq in range(5) if seq in consumed] == removed


# --- TensorBoard's writer fails on a full disk, in a thread of its own: ------------------------------------------


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
