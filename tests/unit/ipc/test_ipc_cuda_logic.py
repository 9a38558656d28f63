"""What the CUDA backend decides, on a fake runtime in host memory. That the calls themselves work is
tests/gpu's matter.
"""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from staged_copies import staging

from async_grpo_ipc import (
    AttachError,
    ExporterDiedError,
    MismatchError,
    NoRoomError,
    WeightExporter,
    memory,
    open_remote_memory,
)
from async_grpo_ipc.memory import cuda
from async_grpo_ipc.memory.cuda import CudaAttachment, CudaExport
from kit.fake_cuda import FakeRuntime, Knobs


class NotingRuntime(FakeRuntime):
    """Opens what this process has allocated itself, and notes what it was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Knobs(folder=str(folder), gpus=("GPU-a", "GPU-b")))
        self.asked: list[tuple[int, bytes]] = []
        self.closed: list[int] = []
        self.breaks = ""
        self.staged: list[tuple[int, int]] = []

    def change(self, **knobs: Any) -> None:
        self.knobs = replace(self.knobs, **knobs)

    def open_handle(self, device, handle):
        if self.breaks:
            raise RuntimeError(self.breaks)
        self.asked.append((device, handle))
        return next(pointer for pointer in self.allocated if self.handle_of(device, pointer) == handle)

    def close_handle(self, device, pointer):
        self.closed.append(pointer)

    def staging(self, owner, reader):
        self.staged.append((owner, reader))
        return staging(seed=0, nbytes=512)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NotingRuntime:
    runtime = NotingRuntime(tmp_path)
    monkeypatch.setattr(cuda, "load_runtime", lambda: runtime)
    return runtime


@pytest.fixture
def exported(runtime: NotingRuntime) -> CudaExport:
    return CudaExport(torch.device("cuda", 0), [4096, 512])


def test_handles_are_hex_and_blocks_raw_allocations(exported, runtime):
    description = exported.describe()
    assert description["device_uuid"] == "GPU-a"
    assert [len(bytes.fromhex(block["handle"])) for block in description["blocks"]] == [64, 64]
    assert [block["nbytes"] for block in description["blocks"]] == [4096, 512]
    assert [len(block) % (2 << 20) for _, block in runtime.allocated.values()] == [0, 0]


def test_the_exporters_own_process_uses_its_pointer(exported, runtime):
    attached = CudaAttachment(exported.describe(), os.getpid(), None)
    assert runtime.asked == []
    exported.blocks[1].fill_(7)
    assert attached.blocks[1].eq(7).all()


def test_a_handle_is_opened_once_and_closed_with_its_last_tensor(exported, runtime):
    first = CudaAttachment(exported.describe(), 1, None)
    second = CudaAttachment(exported.describe(), 1, None)
    assert len(runtime.asked) == 2, "one a block, not one an attachment"
    kept = second.blocks[0]
    first.close()
    second.close()
    gc.collect()
    assert len(runtime.closed) == 1, "a tensor in use keeps its memory mapped"
    del kept
    gc.collect()
    assert len(runtime.closed) == 2


@pytest.mark.parametrize("reader", ["cuda:1", "cpu"])
def test_the_owners_gpu_is_found_by_uuid_not_by_index_also_by_a_reader_on_the_cpu(exported, runtime, reader):
    description = exported.describe()
    runtime.change(gpus=("GPU-b", "GPU-a"))
    attached = CudaAttachment(description, 1, torch.device(reader))
    assert [device for device, _ in runtime.asked] == [1, 1]
    assert attached.alias_device is not None


def test_a_peer_maps_with_its_own_device_current_and_only_pulls(exported, runtime):
    attached = CudaAttachment(exported.describe(), 1, torch.device("cuda", 1))
    assert [device for device, _ in runtime.asked] == [1, 1]
    assert attached.alias_device is None


def test_without_peer_access_the_owners_device_maps_and_it_is_said(exported, runtime, caplog):
    runtime.change(peers=False)
    cuda._say_that_it_goes_through_the_host.cache_clear()
    for _ in range(2):
        attached = CudaAttachment(exported.describe(), 1, torch.device("cuda", 1))
        assert attached.alias_device is None
        assert attached.staging is not None
    assert [device for device, _ in runtime.asked] == [0, 0]
    assert runtime.staged == [(0, 1)] * 2
    assert caplog.text.count("copied through the host") == 1, "said once a process"


def test_with_peer_access_nothing_is_staged(exported, runtime):
    assert CudaAttachment(exported.describe(), 1, torch.device("cuda", 1)).staging is None
    assert CudaAttachment(exported.describe(), 1, torch.device("cuda", 0)).staging is None


def test_a_pull_without_peer_access_goes_through_the_pinned_buffers(handle: Path, runtime, trainer, tiny, monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(memory, "_allocate", lambda device, generation, sizes, way: CudaExport(gpu, sizes))
    monkeypatch.setenv(cuda.NO_PEER, "1")
    with WeightExporter.from_model(trainer, handle) as exporter:
        exporter.publish(1)
        with open_remote_memory(handle, device="cuda:0") as remote:
            model = tiny(2)
            assert not remote.can_alias(model)
            assert remote.pull(model) == 1
    assert runtime.staged == [(0, 0)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.parameters(), strict=True))


def test_an_open_that_fails_lists_the_usual_reasons(exported, runtime):
    runtime.breaks = "cudaErrorInvalidContext: invalid device context"
    with pytest.raises(AttachError, match=r"GPU 0 \(GPU-a\) cannot map .* different containers .* WSL"):
        CudaAttachment(exported.describe(), 1, None)


@pytest.mark.parametrize("said", ["cudaErrorMemoryAllocation: out of memory", "CUDA out of memory. Tried to allocate"])
def test_no_room_for_an_open_is_no_reason_never_to_try_again(exported, runtime, said):
    """A worker that gets `AttachError` at its first start ends the run: every other would."""
    runtime.breaks = said
    with pytest.raises(NoRoomError, match="has no room for what it takes to map weights"):
        CudaAttachment(exported.describe(), 1, None)
    runtime.breaks = ""
    CudaAttachment(exported.describe(), 1, None)


def test_memory_that_cannot_be_used_is_told_as_memory_that_cannot_be_opened(exported, runtime, monkeypatch):
    def cannot(*_):
        raise RuntimeError("cudaErrorInvalidValue")

    monkeypatch.setattr(runtime, "tensor", cannot)
    with pytest.raises(AttachError, match=r"cannot map the weights .*cudaErrorInvalidValue"):
        CudaAttachment(exported.describe(), 1, None)


def test_no_gpu_and_no_cupy_are_told_apart(exported, runtime, monkeypatch):
    description = exported.describe()
    runtime.change(gpus=())
    with pytest.raises(AttachError, match="this process sees no GPU"):
        CudaAttachment(description, 1, None)

    monkeypatch.setattr(cuda, "load_runtime", Mock(side_effect=ImportError("No module named 'cupy'")))
    with pytest.raises(AttachError, match="Install cupy-cuda12x"):
        CudaAttachment(description, 1, None)


@pytest.mark.parametrize("attached", [True, False])
def test_memory_is_freed_only_when_nobody_maps_it(exported, runtime, attached):
    exported.close(in_use=attached)
    assert bool(runtime.allocated) is attached


def test_the_whole_way_through_files_and_locks(handle: Path, runtime, trainer, tiny, monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(memory, "_allocate", lambda device, generation, sizes, way: CudaExport(gpu, sizes))
    exporter = WeightExporter.from_model(trainer, handle)
    exporter.publish(1)
    with open_remote_memory(handle) as remote:
        model = tiny(2)
        remote.alias(model)
        assert torch.equal(model.body.weight, trainer.body.weight)
        runtime.synchronized = 0
        exporter.publish(2)
        assert runtime.synchronized == 1, "the copy is done before the version is READY"
        remote.refresh()
        assert runtime.synchronized >= 2, "the last kernel that reads the old slot is done before its lease is dropped"
        with open_remote_memory(handle, device="cuda:1") as peer, pytest.raises(MismatchError, match="on another GPU"):
            peer.alias(tiny(3))
        exporter.close()
        assert runtime.allocated, "a reader still maps it"
        with pytest.raises(ExporterDiedError, match="left nothing that may be read"):
            remote.refresh()
