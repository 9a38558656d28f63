"""Publishing, leasing, pulling and aliasing. Exporter and readers exclude each other in one process, too."""

import gc
import json

import pytest
import torch
from torch import nn

from async_grpo_ipc import (
    Blueprint,
    ExporterAliveError,
    ExporterDiedError,
    HandleFileError,
    MismatchError,
    ShareTimeoutError,
    WeightExporter,
    flatten_parameters,
    open_remote_memory,
)
from async_grpo_ipc.header import SlotState
from async_grpo_ipc.leases import FIRST_SLOT_BYTE


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def test_nothing_is_ready_before_the_first_publish(exporter, handle):
    with open_remote_memory(handle) as remote:
        assert remote.version is None
        assert remote.exporter_alive()
        with pytest.raises(ShareTimeoutError, match="slot 0 EMPTY, slot 1 EMPTY; exporter alive"):
            with remote.lease(timeout_s=0.01):
                pass
        assert exporter.publish(3)
        assert remote.version == exporter.version == 3


def test_lease_shows_every_tensor_without_a_copy(exporter, handle, trainer):
    exporter.publish(1)
    with open_remote_memory(handle) as remote:
        with remote.lease() as view:
            assert view.version == 1
            assert view.generation == exporter.generation == remote.generation
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


def test_pull_copies_and_keeps_the_parameters_in_place(exporter, handle, trainer, tiny):
    exporter.publish(1)
    model = tiny(2)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with open_remote_memory(handle) as remote:
        assert remote.pull(model) == 1
        assert same(model, trainer)
        step(trainer)
        exporter.publish(2)
        assert not same(model, trainer)
        assert remote.pull(model) == 2
        assert same(model, trainer)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_pull_follows_a_model_that_moves(exporter, handle, trainer, tiny):
    exporter.publish(1)
    model = tiny(2)
    with open_remote_memory(handle) as remote:
        remote.pull(model)
        flatten_parameters(model)
        model.body = nn.Linear(8, 8)
        remote.pull(model)
        assert same(model, trainer)


def test_aliased_model_stays_on_its_version_until_refresh(exporter, handle, trainer, tiny):
    exporter.publish(1)
    model = tiny(2)
    objects = list(model.parameters())
    with open_remote_memory(handle) as remote:
        assert remote.alias(model) == 1
        assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
        assert same(model, trainer)
        before = model.body.weight.clone()
        step(trainer)
        assert exporter.publish(2)
        assert not exporter.publish(3), "slot of version 1 is aliased, slot of version 2 is the newest"
        assert exporter.skipped == 1
        assert exporter.version == 2
        assert torch.equal(model.body.weight, before)
        assert remote.refresh() == 2
        assert same(model, trainer)
        assert exporter.publish(3)
        assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def test_idle_worker_does_not_block_publishing(exporter, handle, trainer, tiny):
    exporter.publish(1)
    model = tiny(2)
    with open_remote_memory(handle) as remote:
        remote.alias(model)
        remote.release()
        for version in range(2, 6):
            step(trainer)
            assert exporter.publish(version)
        assert remote.refresh() == 5
        assert same(model, trainer)


def test_meta_model_gets_its_only_memory_by_aliasing(exporter, handle, trainer, tiny):
    exporter.publish(1)
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    model_on_meta = tiny(2).to("meta")
    with open_remote_memory(handle) as remote:
        remote.alias(model_on_meta)
        assert same(model_on_meta, trainer)
        assert model_on_meta.head.weight is model_on_meta.embed.weight
        remote.detach(keep_weights=True)
        assert same(model_on_meta, trainer)
        with pytest.raises(MismatchError, match="weight of this model is not published"):
            remote.alias(model)
        with pytest.raises(MismatchError, match="meta device and has no memory"):
            remote.pull(tiny(2).to("meta"))


def test_close_leaves_no_parameter_in_shared_memory(exporter, handle, tiny):
    exporter.publish(1)
    model = tiny(2)
    remote = open_remote_memory(handle)
    remote.alias(model)
    remote.close()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.body.weight.shape == (8, 8)
    assert exporter.publish(2) and exporter.publish(3)


def test_released_weights_are_not_copied_out(exporter, handle, tiny):
    exporter.publish(1)
    with open_remote_memory(handle) as remote:
        remote.alias(tiny(2))
        remote.release()
        with pytest.raises(ValueError, match="lease was released"):
            remote.detach(keep_weights=True)


def test_aliased_model_cannot_be_pulled_into(exporter, handle, tiny):
    exporter.publish(1)
    model = tiny(2)
    with open_remote_memory(handle) as remote:
        remote.alias(model)
        with pytest.raises(MismatchError, match="aliased"):
            remote.pull(model)


def test_an_aliased_model_keeps_its_lease_when_the_remote_is_forgotten(exporter, handle, trainer, tiny):
    exporter.publish(1)
    model = tiny(2)
    open_remote_memory(handle).alias(model)
    gc.collect()
    before = model.body.weight.clone()
    step(trainer)
    assert exporter.publish(2) and not exporter.publish(3)
    assert torch.equal(model.body.weight, before)


def test_modules_without_tensors_may_be_swapped(handle, trainer, tiny):
    trainer.dropout = nn.Dropout()
    with WeightExporter.from_model(trainer, handle, buffers=True) as exporter:
        trainer.dropout = nn.Identity()
        assert exporter.publish(1)


def test_a_slots_record_is_read_again_under_its_lock(exporter, handle, monkeypatch):
    """The writer may take a slot, mark it WRITING and die between a reader's look at the header and its lock."""
    exporter.publish(1)
    exporter.publish(2)
    with open_remote_memory(handle) as remote:
        leases = remote._generations.current._control.leases
        acquire = leases.try_acquire

        def acquire_after_the_writer(slot: int) -> bool:
            monkeypatch.setattr(leases, "try_acquire", acquire)
            exporter._control.header.mark(slot, SlotState.WRITING, 3)
            return acquire(slot)

        monkeypatch.setattr(leases, "try_acquire", acquire_after_the_writer)
        with remote.lease() as view:
            assert view.version == 1
        for slot in range(2):
            assert exporter._control.locks.try_exclusive(FIRST_SLOT_BYTE + slot), "no lease is left behind"


def test_several_models_and_leases_share_one_slot(exporter, handle, tiny):
    exporter.publish(1)
    first, second = tiny(2), tiny(3)
    with open_remote_memory(handle) as remote:
        remote.alias(first)
        remote.alias(second)
        with remote.lease():
            pass
        exporter.publish(2)
        assert not exporter.publish(3), "the models still hold their lease when a shorter one has ended"
        assert remote.refresh() == 2
        assert same(first, second)


def test_lora_publishes_the_frozen_base_once(handle, trainer, tiny):
    trainer.embed.weight.requires_grad_(False)
    base = trainer.embed.weight.detach().clone()
    with WeightExporter.from_model(trainer, handle) as exporter, open_remote_memory(handle) as remote:
        names = {spec["name"] for spec in json.loads(handle.read_text())["static"]["tensors"]}
        assert names == {"embed.weight"}
        model = tiny(2)
        exporter.publish(1)
        remote.alias(model)
        address = model.embed.weight.data_ptr()
        step(trainer)
        exporter.publish(2)
        remote.refresh()
        assert model.embed.weight.data_ptr() == address
        assert torch.equal(model.embed.weight, base)
        assert torch.equal(model.body.weight, trainer.body.weight)
        pulled = tiny(3)
        remote.pull(pulled)
        assert torch.equal(pulled.head.weight, model.embed.weight)
        trainer.embed.weight.requires_grad_(True)
        with pytest.raises(MismatchError, match=r"embed\.weight was frozen"):
            exporter.publish(3)


def test_skipped_frozen_parameters_are_the_readers_own(handle, trainer, tiny):
    trainer.embed.weight.requires_grad_(False)
    model = tiny(2)
    own = model.embed.weight.clone()
    with (
        WeightExporter.from_model(trainer, handle, frozen="skip") as exporter,
        open_remote_memory(handle) as remote,
    ):
        exporter.publish(1)
        remote.alias(model)
        assert torch.equal(model.embed.weight, own)
        assert torch.equal(model.body.weight, trainer.body.weight)


def test_include_chooses_tensors(handle, trainer, tiny):
    model = tiny(2)
    chosen = WeightExporter.from_model(trainer, handle, include=lambda name, tensor: name.startswith("body"))
    with chosen as exporter, open_remote_memory(handle) as remote:
        exporter.publish(1)
        remote.pull(model)
        assert torch.equal(model.body.weight, trainer.body.weight)
        assert not torch.equal(model.scale, trainer.scale)


def test_cast_on_publish(handle, trainer, tiny):
    model = tiny(2).to(torch.bfloat16)
    with WeightExporter.from_model(trainer, handle, dtype=torch.bfloat16, buffers=True) as exporter:
        exporter.publish(1)
        with open_remote_memory(handle) as remote:
            remote.alias(model)
            assert torch.equal(model.body.weight, trainer.body.weight.to(torch.bfloat16))
            assert model.steps.dtype == torch.int64


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
    ],
)
def test_every_dtype_travels_bit_for_bit(handle, dtype):
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    with WeightExporter.from_tensors({"t": tensor, "again": tensor}, handle) as exporter:
        exporter.publish(1)
        with open_remote_memory(handle) as remote, remote.lease() as view:
            assert view["t"].dtype == dtype
            assert torch.equal(view["t"].view(torch.uint8), tensor.view(torch.uint8))
            assert view["again"].data_ptr() == view["t"].data_ptr()


@pytest.mark.parametrize("flatten_trainer", [False, True])
@pytest.mark.parametrize("flatten_worker", [False, True])
def test_flattened_models_publish_and_pull_the_same(handle, trainer, tiny, flatten_trainer, flatten_worker):
    model = tiny(2)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=1.0)
    if flatten_trainer:
        flatten_parameters(trainer)
    if flatten_worker:
        flatten_parameters(model)
    with (
        WeightExporter.from_model(trainer, handle, buffers=True) as exporter,
        open_remote_memory(handle) as remote,
    ):
        for version in (1, 2):
            trainer.body(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            exporter.publish(version)
            remote.pull(model)
            assert same(model, trainer)
            assert model.head.weight is model.embed.weight


def test_trainer_that_moves_is_followed_and_one_that_is_rebuilt_is_refused(exporter, handle, trainer, tiny):
    model = tiny(2)
    with open_remote_memory(handle) as remote:
        exporter.publish(1)
        flatten_parameters(trainer)
        step(trainer)
        exporter.publish(2)
        remote.pull(model)
        assert same(model, trainer)
        trainer.scale = nn.Parameter(torch.zeros(()))
        with pytest.raises(MismatchError, match="scale of the exported model was replaced"):
            exporter.publish(3)


def test_versions_must_grow(exporter):
    exporter.publish(5)
    with pytest.raises(ValueError, match="version must grow: 5 after 5"):
        exporter.publish(5)


def test_single_slot_is_exclusive(handle, trainer):
    with (
        WeightExporter.from_model(trainer, handle, slots=1) as exporter,
        open_remote_memory(handle) as remote,
    ):
        assert exporter.publish(1)
        with remote.lease():
            assert not exporter.publish(2)
        assert exporter.publish(2)


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
    with pytest.raises(ExporterAliveError, match="already publishes at"):
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


def test_exporter_that_never_published_and_is_gone(trainer, handle):
    exporter = WeightExporter.from_model(trainer, handle)
    with open_remote_memory(handle) as remote:
        exporter.close()
        with pytest.raises(ExporterDiedError, match="has ended"):
            remote.refresh(timeout_s=30)


def test_opening_waits_only_when_asked(handle):
    with pytest.raises(HandleFileError, match="does not exist") as caught:
        open_remote_memory(handle, timeout_s=0.05)
    assert any("Waited 0.05 s" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("slots", [0, 64])
def test_number_of_slots_is_checked(handle, trainer, slots):
    with pytest.raises(ValueError, match="slots must be between 1 and 63"):
        WeightExporter.from_model(trainer, handle, slots=slots)


def test_model_without_trainable_parameters_is_refused(handle, trainer):
    trainer.requires_grad_(False)
    with pytest.raises(ValueError, match="frozen='changing'"):
        WeightExporter.from_model(trainer, handle)
    with WeightExporter.from_model(trainer, handle, frozen="changing") as exporter:
        assert exporter.publish(1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no tensor to publish"),
        ({"t": torch.zeros(2, 2).to_sparse()}, "Tensor t is not a plain dense tensor"),
        ({"t": torch.zeros(2, device="meta")}, "Tensor t is on meta"),
    ],
)
def test_tensors_that_cannot_be_published(handle, tensors, message):
    with pytest.raises(ValueError, match=message):
        WeightExporter.from_tensors(tensors, handle)


def test_mismatches_say_what_and_where(exporter, handle, tiny):
    exporter.publish(1)
    with open_remote_memory(handle) as remote:
        model = tiny(2)
        model.body.bias = nn.Parameter(torch.zeros(9))
        with pytest.raises(MismatchError, match=r"body\.bias has shape \(9,\) in this model and \(8,\) at .*json"):
            remote.alias(model)
        with pytest.raises(MismatchError, match=r"is torch\.float64 in this model and torch\.float32 at"):
            remote.pull(tiny(2).double())
        model = tiny(2)
        model.extra = nn.Parameter(torch.zeros(1))
        with pytest.raises(MismatchError, match="extra of this model is not published"):
            remote.pull(model)
        model = tiny(2)
        model.scale, model.permuted = model.body.bias, model.body.bias
        with pytest.raises(MismatchError, match="are tied in this model and published separately"):
            remote.pull(model)
        assert exporter.publish(2) and exporter.publish(3), "a refused model leaves no lease behind"


def test_untied_reader_shares_memory_when_aliased(exporter, handle, trainer, tiny):
    exporter.publish(1)
    model = tiny(2)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with open_remote_memory(handle) as remote:
        remote.alias(model)
        assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
        assert same(model, trainer)
        remote.pull(other := tiny(3))
        assert same(other, trainer)


def test_a_sharded_trainer_writes_what_no_process_holds_whole(handle, trainer, tiny):
    """The blueprint is taken before the model is sharded; afterwards only `write` knows the values."""
    trainer.embed.weight.requires_grad_(False)
    blueprint = Blueprint.of_model(trainer)
    asked = []

    def write(destinations):
        asked.append(sorted(destinations))
        for name, destination in destinations.items():
            destination.copy_(trainer.get_parameter(name).detach())

    exporter = WeightExporter.from_blueprint(blueprint, write, handle, device=torch.device("cpu"))
    with exporter, open_remote_memory(handle) as remote:
        model = tiny(2)
        exporter.publish(1)
        remote.alias(model)
        assert same_parameters(trainer, model)
        trainer.body.weight.data.add_(1)
        exporter.publish(2)
        assert remote.refresh() == 2
        assert same_parameters(trainer, model)
    frozen, *versions = asked
    assert frozen == ["embed.weight"]
    assert versions == [sorted(name for name, p in trainer.named_parameters() if p.requires_grad)] * 2


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_blueprint_of_which_nothing_trains(handle, trainer):
    blueprint = Blueprint.of_model(trainer.requires_grad_(False))
    with pytest.raises(ValueError, match="No parameter of the blueprint trains"):
        WeightExporter.from_blueprint(blueprint, lambda _: None, handle, device=torch.device("cpu"))
