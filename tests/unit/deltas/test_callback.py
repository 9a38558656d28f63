"""A training with `DeltaCallback` ends as it would without, whatever becomes of its versions."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from published_model import Model

from async_grpo.deltas import DeltaCallback, recorder
from async_grpo.deltas.recorder import Encoder


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
