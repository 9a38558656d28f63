"""What a GPU refuses, on the fake runtime (tests/kit/fake_cuda.py): no room, no handle, no pinned memory."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from async_grpo_ipc import (
    AttachError,
    ExporterDiedError,
    IPCError,
    WeightExporter,
    attachment,
    memory,
    open_remote_memory,
)
from async_grpo_ipc.control import Control
from async_grpo_ipc.handle import read_head
from async_grpo_ipc.locks import is_exiting
from async_grpo_ipc.memory import cuda_runtime
from kit.fake_cuda import FakeRuntime, Knobs, install

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRuntime]:
    return lambda **knobs: install(Knobs(folder=str(tmp_path), **knobs), monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "handle.json"


def kind(path: Path) -> str:
    return "cuda" if '"kind": "cuda"' in path.read_text() else "posix"


def pulled(path: Path, model: nn.Module) -> nn.Module:
    with open_remote_memory(path) as remote:
        other = nn.Linear(3, 2)
        remote.pull(other)
        assert torch.equal(other.weight, model.weight)
    return other


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"room": 5 * MIB}, "cannot be shared (cudaErrorMemoryAllocation"),
        ({"handles": 2}, "cannot be shared (cudaErrorNotSupported"),
        ({"handles": 0}, "the driver gives no handle for its memory (cudaErrorNotSupported"),
    ],
)
def test_what_cannot_be_shared_is_published_in_host_memory(
    machine: Any, path: Path, caplog: pytest.LogCaptureFixture, trouble: dict[str, int], said: str
) -> None:
    runtime, model = machine(**trouble), nn.Linear(3, 2)
    with WeightExporter.from_model(model, path) as exporter:
        assert runtime.allocated == {}, "nothing stays allocated that nobody can use"
        exporter.publish(1)
        assert kind(path) == "posix"
        pulled(path, model)
    (line,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("Weights of Fake GPU-a are published in host memory, which is slower: ") and said in line


def test_torch_is_asked_for_its_unused_memory_first(machine: Any, path: Path) -> None:
    runtime = machine(room=7 * MIB, cached=3 * MIB)
    with WeightExporter.from_model(nn.Linear(3, 2), path):
        assert kind(path) == "cuda"
        assert len(runtime.allocated) == 3


@pytest.mark.parametrize("way", ["auto", "ipc"])
@pytest.mark.parametrize(("room", "slots"), [(7, 2), (9, 3), (12, 5)])
def test_a_gpu_with_little_room_holds_fewer_versions(
    machine: Any, path: Path, caplog: pytest.LogCaptureFixture, way: memory.Way, room: int, slots: int
) -> None:
    runtime, model = machine(room=room * MIB), nn.Linear(3, 2)
    with WeightExporter.from_model(model, path, slots=5, way=way) as exporter:
        assert len(runtime.allocated) == 1 + slots, "blocks of a try that failed are freed"
        assert read_head(path).slots == slots
        for version in range(4):
            assert exporter.publish(version)
        assert kind(path) == "cuda"
        pulled(path, model)
    said = [f"Fake GPU-a has room for {slots} versions of the weights instead of 5: readers may delay new ones."]
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned == (said if slots < 5 else [])


def test_fewer_versions_are_no_way_out_where_there_are_no_handles(machine: Any, path: Path) -> None:
    runtime = machine(handles=5)
    with WeightExporter.from_model(nn.Linear(3, 2), path, slots=5):
        assert kind(path) == "posix"
        assert runtime.allocated == {}


@pytest.mark.parametrize("trouble", [{"room": 5 * MIB}, {"handles": 0}])
def test_ipc_by_hand_is_refused_where_it_cannot_be(machine: Any, path: Path, trouble: dict[str, int]) -> None:
    machine(**trouble)
    with pytest.raises(IPCError, match=r"cannot be shared by CUDA IPC: .* Take 'auto' or 'host'"):
        WeightExporter.from_model(nn.Linear(3, 2), path, way="ipc")
    with WeightExporter.from_model(nn.Linear(3, 2), path, way="host"):
        assert kind(path) == "posix", "and the path is free again"


def test_ipc_of_a_cpu_is_refused(path: Path) -> None:
    with pytest.raises(IPCError, match="only a GPU's memory"):
        WeightExporter.from_model(nn.Linear(3, 2), path, way="ipc")


def test_memory_that_cannot_be_pinned_breaks_nothing_later(
    machine: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine(pin_fails=True)
    model = nn.Linear(3, 2)
    with WeightExporter.from_model(model, path, way="host") as exporter:
        exporter.publish(1)
        pulled(path, model)
    said = [record.message.partition("(")[2] for record in caplog.records if "pinned" in record.message]
    assert said == ["CUDA error 712): publishing takes longer.", "CUDA error 712): reading takes longer."]


def test_a_reader_with_a_gpu_pins_host_memory_as_what_it_may_only_read(machine: Any, path: Path) -> None:
    runtime = machine()
    with WeightExporter.from_model(nn.Linear(3, 2), path, way="host") as exporter:
        exporter.publish(1)
        own = set(runtime.pinned)
        assert len(own) == 1
        before = runtime.synchronized
        with open_remote_memory(path) as remote:
            (flags,) = (runtime.pinned[address] for address in runtime.pinned.keys() - own)
            assert flags == cuda_runtime.READ_ONLY
            with remote.lease() as view:
                address = min(view[name].data_ptr() for name in view.names())
                assert any(0 < address - start < 100 * MIB for start in runtime.pinned.keys() - own)
        assert set(runtime.pinned) == own
        assert runtime.synchronized > before, "what still reads it has ended"
        with open_remote_memory(path, device="cpu"):
            assert set(runtime.pinned) == own, "a CPU reads pageable memory as fast"
    assert runtime.pinned == {}, "let go before it is unmapped"


def test_memory_that_is_not_the_exporters_is_not_left_pinned(
    machine: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = machine()
    with WeightExporter.from_model(nn.Linear(3, 2), path, way="host"):
        own = set(runtime.pinned)
        monkeypatch.setattr(memory, "canary", lambda *_: bytes(4096))
        with pytest.raises(AttachError):
            open_remote_memory(path)
        assert set(runtime.pinned) == own


def test_pinning_leaves_no_context_on_a_gpu_that_is_not_the_trainers(machine: Any) -> None:
    runtime, memory = machine(), torch.zeros(8)
    assert cuda_runtime.pin(memory, torch.device("cuda", 1)) is None
    cuda_runtime.unpin(memory, torch.device("cuda", 1))
    assert runtime.contexts == {1}


# A reader whose exporter dies while it reads


@pytest.fixture
def readers(machine: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An exporter and a reader in one process; `dying` makes the kernel seem to have begun to end the exporter."""
    state = SimpleNamespace(dying=False, runtime=machine())
    monkeypatch.setattr(attachment, "is_exiting", lambda pid: state.dying)
    with WeightExporter.from_model(nn.Linear(3, 2), path) as exporter:
        exporter.publish(1)
        with open_remote_memory(path) as state.remote:
            yield state


@pytest.mark.parametrize("error", [None, ValueError("these weights are not the trainer's")])
def test_what_was_read_under_a_lease_is_not_believed_after_the_exporters_death(
    readers: Any, error: Exception | None
) -> None:
    """Nor is an error that was drawn from lost memory."""
    with pytest.raises(ExporterDiedError), readers.remote.lease():
        readers.dying = True
        if error is not None:
            raise error


@pytest.mark.parametrize("wait", [True, False])
def test_aliased_weights_say_whether_they_are_still_the_ones_published(readers: Any, wait: bool) -> None:
    readers.remote.alias(nn.Linear(3, 2))
    before = readers.runtime.synchronized
    assert readers.remote.intact(wait=wait)
    readers.dying = True
    assert not readers.remote.intact(wait=wait)
    assert readers.runtime.synchronized - before == 2 * wait


def test_weights_that_survive_are_intact_in_any_case(path: Path) -> None:
    exporter = WeightExporter.from_model(nn.Linear(3, 2), path)
    exporter.publish(1)
    with open_remote_memory(path) as remote:
        remote.alias(nn.Linear(3, 2))
        exporter.close()
        assert remote.intact()


def test_a_process_is_exiting_once_the_kernel_takes_it_apart() -> None:
    assert not is_exiting(os.getpid())
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_exiting(child.pid), "a zombie"
    child.wait()
    assert is_exiting(child.pid), "gone"


# The order of calls that keeps a process off GPUs that it does not use


def test_cupy_finds_the_readers_gpu_current_and_makes_it_current_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy's `Device.__exit__` always calls `setDevice` with what it found, which creates a context there."""
    current, contexts = [0], set()

    class TorchDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before  # torch switches back without a context where there is none

    class CupyDevice(TorchDevice):
        def __enter__(self) -> None:
            super().__enter__()
            contexts.add(self.index)

        def __exit__(self, *_: object) -> None:
            super().__exit__()
            contexts.add(current[0])

    calls = SimpleNamespace(malloc=lambda n: 1, free=lambda p: None, ipcGetMemHandle=lambda p: b"h" * 64)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=calls, Device=CupyDevice))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "device", TorchDevice)
    runtime = cuda_runtime.CupyRuntime()
    runtime.handle_of(1, runtime.malloc(1, 2 * MIB))
    runtime.free(1, 1)
    assert contexts == {1}
    assert current == [0]


def test_a_tensor_of_hidden_memory_is_made_without_asking_about_its_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `cudaPointerGetAttributes` says of memory on a GPU that a process does not see is not documented."""

    class Hidden:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"cudaErrorInvalidValue: {name}")

    class Owner:
        memory = np.arange(64, dtype=np.uint8)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=Hidden())))
    runtime = cuda_runtime.CupyRuntime()
    monkeypatch.setattr(runtime, "torch_device", lambda index: torch.device("cpu"))
    owner = Owner()
    kept = weakref.ref(owner)
    whole = runtime.tensor(1, Owner.memory.ctypes.data, 64, owner)
    del owner
    part = whole[8:16].view(torch.int64)
    assert whole.tolist() == list(range(64))
    del whole
    gc.collect()
    assert kept() is not None, "a view uses the memory still"
    del part
    gc.collect()
    assert kept() is None


# Freed memory is in nobody's hands


def test_no_reader_attaches_while_the_memory_is_given_back(
    machine: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has read the handle file before it was withdrawn: to map freed memory is undefined."""
    runtime = machine()
    exporter = WeightExporter.from_model(nn.Linear(3, 2), path)
    late, refused = read_head(path), []

    def free(device: int, pointer: int) -> None:
        with pytest.raises(ExporterDiedError):
            Control.attach(late.pid, late.control_fd, late.control_inode, late.generation, late.slots, str(path))
        refused.append(pointer)

    monkeypatch.setattr(runtime, "free", free)
    exporter.close()
    assert len(refused) == 3


# A frozen base exists once


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_frozen_base_exists_once_on_the_exporters_device(
    machine: Any, path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    if on_gpu:
        machine()
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    before, own = model[0].weight.clone(), weakref.ref(model[0].weight.untyped_storage())
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(own() is None))
    exporter = WeightExporter.from_model(model, path, share_frozen=True)
    assert emptied == [True], "given back once nothing refers to it"
    exporter.publish(1)
    with open_remote_memory(path) as remote, remote.lease() as view:
        assert torch.equal(view["0.weight"], before)
        assert (view["0.weight"].data_ptr() == model[0].weight.data_ptr()) is on_gpu  # else mapped a second time
    exporter.close()
    assert torch.equal(model[0].weight, before), "the trainer goes on with it, to its last checkpoint"
    model(torch.ones(3)).sum().backward()
    assert model[1].weight.grad is not None


def test_a_frozen_base_that_is_published_elsewhere_stays_where_it_is(machine: Any, path: Path) -> None:
    machine()
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    address = model[0].weight.data_ptr()
    with WeightExporter.from_model(model, path, share_frozen=True, dtype=torch.bfloat16):
        assert model[0].weight.data_ptr() == address


@pytest.mark.parametrize(("dying", "error"), [(False, AttachError), (True, ExporterDiedError)])
def test_an_exporter_that_dies_while_a_reader_attaches_is_no_trouble_of_the_readers(
    readers: Any, path: Path, monkeypatch: pytest.MonkeyPatch, dying: bool, error: type[Exception]
) -> None:
    """Its handle does not open any more. A worker would take `AttachError` for a setup that it can never use."""
    monkeypatch.setattr(memory, "attach", Mock(side_effect=AttachError("cudaErrorMapBufferObjectFailed")))
    readers.dying = dying
    with pytest.raises(error):
        open_remote_memory(path)
