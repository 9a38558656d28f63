"""What a parameter server publishes is kept bit for bit, beside the training and never in its way."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from delta_chains import ABOUT
from torch import Tensor, nn

from async_grpo.deltas import DeltaCallback, recorder
from async_grpo.deltas.chain import Chain
from async_grpo.deltas.recorder import DeltaRecorder, Encoder
from async_grpo.deltas.tensors import as_tensors
from async_grpo.deltas.writer import ChainWriter
from async_grpo.errors import DeltaChainError, DiskFullError
from async_grpo.settings import TrainingSettings
from async_grpo.training.weight_publisher import WeightPublisher
from async_grpo_ipc import WeightExporter


class Saving:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")


class Model(nn.Module):
    """One frozen and two trained matrices, and what `save_pretrained` of a model is asked for."""

    config = Saving()

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.embed.requires_grad_(False)


Versions = dict[int, dict[str, Tensor]]


class Run:
    """A training of `Model`, its versions published and kept."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.folder = tmp_path / "deltas"
        settings = TrainingSettings(**{"delta_every": 1, **options})
        handle = tmp_path / "handle.json"
        trainer: Any = SimpleNamespace(model=self.model, processing_class=None)
        self.recorder = DeltaRecorder(trainer, handle, self.folder, "r", settings)
        exporter = WeightExporter.from_model(self.model, handle, slots=4)
        self.publisher = WeightPublisher(lambda: exporter, self.recorder)
        self.saved: Versions = {}

    def step(self, version: int) -> None:
        with torch.no_grad():
            for parameter in self.model.layers.parameters():
                parameter += 1e-3 * torch.randn_like(parameter) * (torch.rand_like(parameter) < 0.1)
        self.saved[version] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.publisher.publish(version)

    def kept(self) -> list[int]:
        """End the training; the versions of its chain, each of which is exact."""
        self.publisher.close()
        assert is_exact(self)
        return Chain(self.folder).versions

    @property
    def encoder(self) -> Encoder:
        assert self.recorder.encoder is not None
        return self.recorder.encoder

    def written(self, version: int) -> None:
        """Wait until `version` is on the disk."""
        recorder.wait_until(lambda: self.encoder.last == version or None, what="a delta", timeout_s=60, poll_s=0.001)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A training whose version 0 is on the disk."""
    run = Run(tmp_path)
    run.step(0)
    run.written(0)
    return run


def is_exact(run: Run) -> bool:
    chain = Chain(run.folder)
    return not chain.verify().problems and all(
        torch.equal(tensor.view(torch.int32), run.saved[version][name].view(torch.int32))
        for version in chain.versions
        for name, tensor in as_tensors(chain.rebuild(version), chain.about.tensors).items()
    )


def test_every_third_version_and_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path, delta_every=3)
    for version in range(9):
        run.step(version)
        if version % 3 == 0:
            run.written(version)
    assert run.kept() == [0, 3, 6, 8]


def writing_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no version be written before this event."""
    go = threading.Event()
    append = recorder.ChainWriter.append

    def slowly(self: Any, *args: Any) -> Any:
        assert go.wait(60)
        return append(self, *args)

    monkeypatch.setattr(recorder.ChainWriter, "append", slowly)
    return go


def test_versions_that_come_faster_than_they_are_written_are_spanned_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setattr(recorder, "WAITING_BYTES", 0)
    run = Run(tmp_path)
    run.step(0)
    run.written(0)
    go = writing_waits(monkeypatch)
    for version in range(1, 9):
        run.step(version)  # returns at once
        assert run.publisher.version == version
    go.set()
    versions = run.kept()
    assert versions[:2] == [0, 1] and versions[-1] == 8 and len(versions) in (3, 4)
    assert any("spans" in line and "encoding is slower than training" in line for line in warnings)


def test_small_versions_wait_for_a_slow_encoder_and_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, go = Run(tmp_path), writing_waits(monkeypatch)
    for version in range(30):
        run.step(version)
    go.set()
    assert run.kept() == list(range(30))


def test_versions_that_an_evaluation_holds_back_are_kept_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for version in range(12):
        if version == 4:
            assert run.publisher.hold() == 3
        if version == 8:
            assert run.publisher.version == 3, "workers see no newer one before the evaluation has ended"
            run.publisher.release()
            run.publisher.retry()  # version 7 is published later than it was kept
        run.step(version)
    assert run.publisher.version == 11
    assert run.kept() == list(range(12))


def test_a_run_that_ends_while_an_evaluation_holds_has_its_last_version(run: Run) -> None:
    run.publisher.hold()
    for version in (1, 2):
        run.step(version)
    assert run.kept() == [0, 1, 2]


def test_a_full_disk_costs_a_version_and_not_the_training(
    run: Run, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    write = recorder.ChainWriter._write

    def no_room(self: Any, name: str, pieces: Any) -> int:
        if name == "000001.delta":
            raise DiskFullError("The disk is full.")
        return write(self, name, pieces)

    monkeypatch.setattr(recorder.ChainWriter, "_write", no_room)
    for version in (1, 2, 3):
        run.step(version)
        if version > 1:
            run.written(version)
    assert run.kept() == [0, 2, 3] and Chain(run.folder).entries[2].header.is_snapshot
    assert any("version 1 is not kept" in line for line in warnings)


def test_a_thread_that_fails_ends_the_chain_and_not_the_training(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.ChainWriter, "append", Mock(side_effect=OSError("gone")))
    for version in range(1, 6):
        run.step(version)
    run.publisher.close()
    assert run.encoder.last == 0
    assert is_exact(run)


def test_a_copy_that_fails_holds_no_slot_and_one_at_most_is_held(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that stays keeps a slot from the trainer until the run ends."""
    go = threading.Event()

    def broken(*_: Any) -> Any:
        assert go.wait(60)
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(recorder, "copied", broken)
    run.step(1)
    run.step(2)
    attachment = run.recorder._attachment
    assert attachment is not None and attachment._held.total() == 1
    go.set()
    recorder.wait_until(lambda: attachment._held.total() == 0 or None, what="the leases to end", timeout_s=60)
    run.publisher.close()
    assert run.encoder.has_failed and run.encoder.last == 0


def test_copying_and_encoding_have_a_lower_priority_than_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nice: dict[str, int] = {}

    def spy_on(owner: type, name: str) -> None:
        work = getattr(owner, name)

        def spied(self: Any, *args: Any) -> Any:
            nice[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            return work(self, *args)

        monkeypatch.setattr(owner, name, spied)

    spy_on(DeltaRecorder, "_copy_of")
    spy_on(Encoder, "_write")
    run = Run(tmp_path)
    run.step(0)
    run.publisher.close()
    lower = max(os.getpriority(os.PRIO_PROCESS, 0), recorder.NICENESS)
    assert nice == {"_copy_of": lower, "_write": lower}


def test_versions_that_are_not_written_in_time_are_said_and_nothing_is_torn_away(
    run: Run, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    go = writing_waits(monkeypatch)
    monkeypatch.setattr(recorder, "ENDING_S", 0.01)
    run.step(1)
    run.publisher.close()
    assert any("version 1 may be missing" in line for line in warnings)
    with pytest.raises(DeltaChainError):
        ChainWriter(run.folder, ABOUT)  # the thread still writes
    go.set()
    run.written(1)
    assert is_exact(run)


def test_a_chain_of_another_run_is_refused_before_training(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.step(0)
    first.publisher.close()
    (first.folder / "chain.json").write_text((first.folder / "chain.json").read_text().replace('"r"', '"other"'))
    second = Run(tmp_path)
    with pytest.raises(DeltaChainError):
        second.step(0)
    second.publisher.close()


# --- A training with `DeltaCallback` ends as it would without, whatever becomes of its versions ------------------


class Slow:
    """A training with more steps than there is room for; the encoder stands in a write until `go`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()

        append = recorder.ChainWriter.append

        def fails(writer: Any, version: int, weights: Any) -> Any:
            if version == 0:
                return append(writer, version, weights)
            assert self.go.wait(60)
            raise OSError(errno.EIO, "the disk is broken")

        monkeypatch.setattr(recorder, "WAITING_BYTES", 0)
        monkeypatch.setattr(recorder.ChainWriter, "append", fails)
        self.callback = DeltaCallback(folder)
        self.state: Any = SimpleNamespace(global_step=0, is_world_process_zero=True)
        self.callback.on_train_begin(None, self.state, None, model=Model())
        while self.encoder.last is None or self.encoder.has_capacity():
            self.state.global_step += 1
            self.callback.on_step_end(None, self.state, None)
        self.state.global_step += 1
        self.its_encoder = self.encoder

    @property
    def encoder(self) -> Encoder:
        assert self.callback._encoder is not None
        return self.callback._encoder

    def ends(self) -> None:
        self.callback.on_train_end(None, self.state, None)


def test_an_encoder_that_fails_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Slow(tmp_path / "deltas", monkeypatch)
    waits = threading.Event()
    has_capacity = Encoder.has_capacity
    monkeypatch.setattr(Encoder, "has_capacity", lambda self: waits.set() or has_capacity(self))
    training = threading.Thread(target=run.ends, daemon=True)
    training.start()
    assert waits.wait(60), "it waits for capacity"
    run.go.set()
    training.join(60)
    assert not training.is_alive()
    assert run.its_encoder.has_failed


def test_a_slow_encoder_costs_the_last_version_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    run = Slow(tmp_path / "deltas", monkeypatch)
    monkeypatch.setattr(recorder, "ENDING_S", 0.1)
    run.ends()
    assert any(f"version {run.state.global_step} may be missing" in line for line in warnings)
    run.go.set()
    run.its_encoder.thread.join(60)
