"""Publishing, leasing, pulling and aliasing. Exporter and readers exclude each other in one process as well."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared_models import same, step
from torch import nn

from async_grpo_ipc import (
    ExporterAliveError,
    HandleFileError,
    MismatchError,
    RemoteWeights,
    ShareTimeoutError,
    VersionGoneError,
    WeightExporter,
    flatten_parameters,
    open_remote_memory,
)
from async_grpo_ipc.control import SlotState
from async_grpo_ipc.locks import FIRST_SLOT_BYTE


def test_nothing_is_ready_before_the_first_publish(exporter, handle):
    with open_remote_memory(handle) as remote:
        assert remote.version is None
        assert remote.exporter_alive()
        with pytest.raises(ShareTimeoutError, match="slot 0 EMPTY, slot 1 EMPTY; exporter alive"):
            with remote.lease(timeout_s=0.01):
                pass
        assert exporter.publish(3)
        assert remote.version == exporter.version == 3


def test_lease_shows_every_tensor_without_a_copy(published, remote, trainer):
    with remote.lease() as view:
        assert view.version == 1
        assert view.generation == published.generation == remote.generation
        assert set(view.names()) == set(trainer.state_dict())
        assert len(view) == len(view.names())
        assert "scale" in view
        for name, tensor in view.items():
            assert torch.equal(tensor, trainer.state_dict()[name]), name
            assert tensor.data_ptr() % 256 == 0 or tensor.numel() == 0
        assert view["head.weight"].data_ptr() == view["embed.weight"].data_ptr()
        assert view["permuted"].stride() == trainer.permuted.stride()
    with pytest.raises(ValueError, match="lease of this view has ended"):
        view["scale"]


def test_pull_copies_and_keeps_the_parameters_in_place(published, remote, trainer, model):
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert remote.pull(model) == 1
    assert same(model, trainer)
    step(trainer)
    published.publish(2)
    assert not same(model, trainer)
    assert remote.pull(model) == 2
    assert same(model, trainer)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_pull_follows_a_model_that_moves(remote, trainer, model):
    remote.pull(model)
    flatten_parameters(model)
    model.body = nn.Linear(8, 8)
    remote.pull(model)
    assert same(model, trainer)


def test_aliased_model_stays_on_its_version_until_refresh(published, remote, trainer, model):
    objects = list(model.parameters())
    assert remote.alias(model) == 1
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert same(model, trainer)
    before = model.body.weight.clone()
    step(trainer)
    assert published.publish(2)
    assert not published.publish(3), "slot of version 1 is aliased, slot of version 2 is the newest"
    assert (published.skipped, published.version) == (1, 2)
    assert torch.equal(model.body.weight, before)
    assert remote.refresh() == 2
    assert same(model, trainer)
    assert published.publish(3)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_idle_worker_does_not_block_publishing(published, remote, trainer, model):
    remote.alias(model)
    remote.release()
    for version in range(2, 6):
        step(trainer)
        assert published.publish(version)
    assert remote.refresh() == 5
    assert same(model, trainer)


def test_meta_model_gets_its_only_memory_by_aliasing(remote, trainer, tiny):
    model = tiny(2).to("meta")
    remote.alias(model)
    assert same(model, trainer)
    assert model.head.weight is model.embed.weight
    remote.detach(keep_weights=True)
    assert same(model, trainer)
    with pytest.raises(MismatchError, match="weight of this model is not published"):
        remote.alias(nn.Linear(8, 8, device="meta"))
    with pytest.raises(MismatchError, match="meta device and has no memory"):
        remote.pull(tiny(2).to("meta"))


def test_close_leaves_no_parameter_in_shared_memory(published, remote, model):
    remote.alias(model)
    remote.close()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.body.weight.shape == (8, 8)
    assert published.publish(2) and published.publish(3)


def test_an_aliased_model_keeps_its_lease_when_the_remote_is_forgotten(published, handle, trainer, model):
    open_remote_memory(handle).alias(model)
    gc.collect()
    before = model.body.weight.clone()
    step(trainer)
    assert published.publish(2) and not published.publish(3)
    assert torch.equal(model.body.weight, before)


def test_modules_without_tensors_may_be_swapped(handle, trainer, tiny):
    trainer.dropout = nn.Dropout()
    with WeightExporter.from_model(trainer, handle, buffers=True) as exporter:
        trainer.dropout = nn.Identity()
        assert exporter.publish(1)


def test_a_slots_record_is_read_again_under_its_lock(published, remote, monkeypatch):
    """The writer may take a slot, mark it WRITING and die between a reader's look at the header and its lock."""
    published.publish(2)
    locks = remote._generations.follow()._control.locks
    try_lock = locks.try_lock

    def lock_after_the_writer(byte: int, *, shared: bool) -> bool:
        monkeypatch.setattr(locks, "try_lock", try_lock)
        published._control.header.mark(byte - FIRST_SLOT_BYTE, SlotState.WRITING, 3)
        return try_lock(byte, shared=shared)

    monkeypatch.setattr(locks, "try_lock", lock_after_the_writer)
    with remote.lease() as view:
        assert view.version == 1
    for slot in range(2):
        assert published._control.locks.try_lock(FIRST_SLOT_BYTE + slot), "no lease is left behind"


def test_several_models_and_leases_share_one_slot(published, remote, tiny):
    first, second = tiny(2), tiny(3)
    remote.alias(first)
    remote.alias(second)
    with remote.lease():
        pass
    published.publish(2)
    assert not published.publish(3), "the models still hold their lease when a shorter one has ended"
    assert remote.refresh() == 2
    assert same(first, second)


def test_versions_must_grow(exporter):
    exporter.publish(5)
    with pytest.raises(ValueError, match="version must grow: 5 after 5"):
        exporter.publish(5)


def test_version_file_is_for_people(exporter, handle):
    exporter.publish(7)
    shown = json.loads((handle.parent / "ps_ipc_handle_version.json").read_text())
    assert shown["global_step"] == 7
    assert shown["generation"] == exporter.generation
    assert shown["timestamp"] > 0


def test_default_path_comes_from_the_environment(handle, trainer, monkeypatch):
    monkeypatch.setenv("CUDA_IPC_HANDLE_PATH", str(handle))
    with WeightExporter.from_model(trainer) as exporter, open_remote_memory() as remote:
        assert exporter.path == handle
        exporter.publish(1)
        assert remote.version == 1


def test_second_live_exporter_is_refused(exporter, handle, trainer):
    with pytest.raises(ExporterAliveError, match=rf"\(pid {os.getpid()}\) already publishes at"):
        WeightExporter.from_model(trainer, handle)
    assert exporter.publish(1)


def test_reader_follows_to_a_new_generation(handle, trainer, tiny):
    model = tiny(2)
    first = WeightExporter.from_model(trainer, handle, buffers=True)
    first.publish(9)
    remote = open_remote_memory(handle)
    remote.alias(model)
    first.close()
    assert not remote.exporter_alive()
    assert not handle.exists()
    assert remote.refresh() == 9, "the memory is still mapped here"
    step(trainer)
    with WeightExporter.from_model(trainer, handle, buffers=True) as second:
        assert remote.exporter_alive()
        assert remote.version == 9, "nothing newer is published yet"
        second.publish(4)
        assert remote.version == 4
        assert remote.refresh() == 4
        assert remote.generation == second.generation
        assert same(model, trainer)
        remote.close()


def test_models_that_do_not_fit_the_next_exporter_stay_where_they_are(handle, trainer, tiny):
    """A worker that goes on after the error would keep the new exporter from publishing."""
    models = tiny(2), tiny(3)
    first = WeightExporter.from_model(trainer, handle, buffers=True)
    first.publish(1)
    with open_remote_memory(handle) as remote:
        for model in models:
            remote.alias(model)
        models[1].extra = nn.Parameter(torch.zeros(1))
        first.close()
        before = models[0].body.weight.clone()
        step(trainer)
        with WeightExporter.from_model(trainer, handle, buffers=True) as second:
            second.publish(1)
            for move in (remote.refresh, lambda: remote.alias(tiny(4))):
                with pytest.raises(MismatchError):
                    move()
            assert second.publish(2) and second.publish(3), "no lease is left behind"
            assert torch.equal(models[0].body.weight, before)


def test_opening_waits_only_when_asked(handle):
    with pytest.raises(HandleFileError) as caught:
        open_remote_memory(handle, timeout_s=0.05)
    assert any("Waited 0.05 s" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("slots", [0, 64])
def test_number_of_slots_is_checked(handle, trainer, slots):
    with pytest.raises(ValueError, match="slots must be between 1 and 63"):
        WeightExporter.from_model(trainer, handle, slots=slots)


def test_mismatches_say_what_and_where(published, remote, tiny):
    model = tiny(2)
    model.body.bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(MismatchError, match=r"body\.bias has shape \(9,\) in this model and \(8,\) at .*json"):
        remote.alias(model)
    with pytest.raises(MismatchError, match=r"is torch\.float64 in this model and torch\.float32 at"):
        remote.pull(tiny(2).double())
    model = tiny(2)
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(MismatchError):
        remote.pull(model)
    model = tiny(2)
    model.scale, model.permuted = model.body.bias, model.body.bias
    with pytest.raises(MismatchError, match="are tied in this model and published separately"):
        remote.pull(model)
    remote.alias(model := tiny(2))
    with pytest.raises(MismatchError, match="aliased"):
        remote.pull(model)
    remote.release()
    with pytest.raises(ValueError, match="lease was released"):
        remote.detach(keep_weights=True)
    assert published.publish(2) and published.publish(3), "a refused model leaves no lease behind"


def test_untied_reader_shares_memory_when_aliased(remote, trainer, model, tiny):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    remote.alias(model)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert same(model, trainer)
    remote.pull(other := tiny(3))
    assert same(other, trainer)


LEFT_OPEN = """
import sys
from async_grpo_ipc import open_remote_memory
remote = open_remote_memory(sys.argv[1])
lease = remote.lease()
view = lease.__enter__()
print(remote)
"""


def test_what_is_left_open_at_exit_says_nothing(handle, trainer):
    with WeightExporter.from_model(trainer, handle) as exporter:
        exporter.publish(7)
        command = [sys.executable, "-c", LEFT_OPEN, str(handle)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"<RemoteWeights of {handle}: no version is held, models aliased: 0>\n"
        assert exporter.publish(8) and exporter.publish(9), "the kernel has ended the lease"
        with open_remote_memory(handle) as remote:
            assert "no version is held" in repr(remote)
        assert repr(remote).endswith(": closed>")


# --- A lease on a version that another process named: ------------------------------------------------------------


def test_a_held_version_is_read_although_a_newer_one_is_there(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(4)}
    with WeightExporter.from_tensors(weights, tmp_path / "handle.json", slots=3) as exporter:
        exporter.publish(1)
        with open_remote_memory(tmp_path / "handle.json") as holder, open_remote_memory(exporter.path) as reader:
            with holder.lease():
                weights["w"].fill_(2.0)
                exporter.publish(2)
                weights["w"].fill_(3.0)
                exporter.publish(3)
                with reader.lease(version=1) as view:
                    assert view.version == 1
                    assert view["w"].eq(0).all()
                assert reader.version == 3


def test_a_version_that_nobody_held_is_gone(published: WeightExporter, remote: RemoteWeights) -> None:
    published.publish(2)
    published.publish(3)
    with pytest.raises(VersionGoneError, match="Version 1 at"), remote.lease(version=1):
        pass


def test_a_version_that_does_not_come_is_a_sentence(remote: RemoteWeights) -> None:
    with pytest.raises(ShareTimeoutError, match="Version 2 could"), remote.lease(0.01, version=2):
        pass
