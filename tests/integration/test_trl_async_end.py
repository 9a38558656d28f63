"""How a training under TRL's asynchronous trainer ends: once, with its own state, and with room on the disk or without.

What TRL calls is called here, in its order; no worker runs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.experimental.async_grpo import AsyncGRPOConfig

from async_grpo.archive import room
from async_grpo.errors import DiskFullError, UsageError
from async_grpo.rundir.reading import read_object
from async_grpo.trl_async import FileQueueRolloutWorker, rollout_worker

pytestmark = pytest.mark.integration


def worker(folder: Path, **options: Any) -> FileQueueRolloutWorker:
    setup = folder / "setup.py"
    setup.write_text("def get_trainer(): ...")
    args = AsyncGRPOConfig(str(folder / "output"), token_budget=0, report_to="none", bf16=False, use_cpu=True)
    return FileQueueRolloutWorker(setup, args, [{"prompt": "ab"}], run_dir=folder / "run", **options)


def begun(folder: Path) -> FileQueueRolloutWorker:
    """A training that TRL has begun."""
    rollouts = worker(folder, workers=0)
    rollouts.weights.init_weight_transfer()
    rollouts.weights.send_weights(iter([("w", torch.ones(2))]))
    rollouts.update_model_version(1)
    rollouts.start()
    return rollouts


def end(rollouts: FileQueueRolloutWorker) -> None:
    rollouts.stop()
    rollouts.weights.destroy()


def state_of(rollouts: FileQueueRolloutWorker) -> tuple[str, str]:
    return tuple(read_object(rollouts.run_dir / name)["state"] for name in ("run.json", "summary.json"))


def test_a_training_inside_an_except_block_has_not_failed_for_that(tmp_path: Path) -> None:
    try:
        raise FileNotFoundError("no checkpoint, so from the beginning")
    except FileNotFoundError:
        rollouts = begun(tmp_path)
        end(rollouts)
    assert state_of(rollouts) == ("finished", "finished")


def test_a_second_training_is_refused_and_leaves_the_record_of_the_first(tmp_path: Path) -> None:
    rollouts = begun(tmp_path)
    end(rollouts)
    before = read_object(rollouts.run_dir / "summary.json")
    with pytest.raises(UsageError, match="serves one training"):
        try:
            rollouts.rollout_buffer.get(timeout=5.0)  # TRL does not call `start` again
        finally:
            end(rollouts)
    assert read_object(rollouts.run_dir / "summary.json") == before and before["state"] == "finished"


def full_disk(monkeypatch: pytest.MonkeyPatch, writes: int) -> list[str]:
    """So many writes of how the run ended find no room; returns the names of their files."""
    write_text = Path.write_text
    refused: list[str] = []

    def on_a_full_disk(path: Path, text: str, *args: Any, **kwargs: Any) -> int:
        if '"state": "' in text and path.name.startswith((".run.json", ".summary.json")) and len(refused) < writes:
            refused.append(path.name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_text(path, text, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", on_a_full_disk)
    monkeypatch.setattr(room, "RETRY_S", 0.01)
    return refused


def test_the_end_waits_for_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = begun(tmp_path)
    refused = full_disk(monkeypatch, 4)
    end(rollouts)
    assert len(refused) == 4 and state_of(rollouts) == ("finished", "finished")


def test_a_training_that_failed_does_not_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = begun(tmp_path)
    full_disk(monkeypatch, 1000)
    with pytest.raises(DiskFullError, match="of the trainer"):
        try:
            raise DiskFullError("an error of the trainer")
        finally:
            end(rollouts)
    assert not (rollouts.run_dir / "summary.json").exists()
    assert rollouts._run.lock.try_acquire(), "the directory is nobody's"
    rollouts._run.lock.release()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0, "worker_devices": ["1"]}, "workers=0 starts none, and worker_devices=1"),
        ({}, r"TRL's trainer takes 2 GPUs, so say which are left for the workers: worker_devices"),
    ],
)
def test_gpus_are_not_guessed_and_not_forgotten(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_worker, "plan_devices", lambda here, named, count: (here, ("1",)))
    monkeypatch.setattr(rollout_worker, "choose_weights", lambda training, here, chosen: training)
    args: Any = SimpleNamespace(world_size=2, device=SimpleNamespace(type="cuda", index=0))
    devices: Callable[..., dict[str, Any]] = rollout_worker._devices
    given = {"workers": None, "worker_devices": None}
    with pytest.raises(UsageError, match=said):
        devices(args, **{**given, **options})
    assert devices(args, **{**given, "worker_devices": ["1"]})["worker_devices"] == ("1",)
    assert devices(args, **{**given, "workers": 0})["worker_devices"] == ()
