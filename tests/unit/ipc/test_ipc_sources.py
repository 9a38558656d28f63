"""What an exporter publishes: chosen, frozen, tied, cast, flattened and sharded tensors."""

import json

import pytest
import torch
from shared_models import same, step
from torch import nn

from async_grpo_ipc import Blueprint, MismatchError, WeightExporter, flatten_parameters, open_remote_memory


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


def test_skipped_frozen_parameters_are_the_readers_own(handle, trainer, model):
    trainer.embed.weight.requires_grad_(False)
    own = model.embed.weight.clone()
    with WeightExporter.from_model(trainer, handle, frozen="skip") as exporter, open_remote_memory(handle) as remote:
        exporter.publish(1)
        remote.alias(model)
        assert torch.equal(model.embed.weight, own)
        assert torch.equal(model.body.weight, trainer.body.weight)


def test_include_chooses_tensors(handle, trainer, model):
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


DTYPES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int8 int64 bool complex64"


@pytest.mark.parametrize("name", DTYPES.split())
def test_every_dtype_travels_bit_for_bit(handle, name):
    dtype = getattr(torch, name)
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    with WeightExporter.from_tensors({"t": tensor, "again": tensor}, handle) as exporter:
        exporter.publish(1)
        with open_remote_memory(handle) as remote, remote.lease() as view:
            assert view["t"].dtype == dtype
            assert torch.equal(view["t"].view(torch.uint8), tensor.view(torch.uint8))
            assert view["again"].data_ptr() == view["t"].data_ptr()


@pytest.mark.parametrize("flatten_trainer", [False, True])
@pytest.mark.parametrize("flatten_worker", [False, True])
def test_flattened_models_publish_and_pull_the_same(handle, trainer, model, flatten_trainer, flatten_worker):
    optimizer = torch.optim.SGD(trainer.parameters(), lr=1.0)
    if flatten_trainer:
        flatten_parameters(trainer)
    if flatten_worker:
        flatten_parameters(model)
    with WeightExporter.from_model(trainer, handle, buffers=True) as exporter, open_remote_memory(handle) as remote:
        for version in (1, 2):
            trainer.body(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            exporter.publish(version)
            remote.pull(model)
            assert same(model, trainer)
            assert model.head.weight is model.embed.weight


def test_trainer_that_moves_is_followed_and_one_that_is_rebuilt_is_refused(published, remote, trainer, model):
    flatten_parameters(trainer)
    step(trainer)
    published.publish(2)
    remote.pull(model)
    assert same(model, trainer)
    trainer.scale = nn.Parameter(torch.zeros(()))
    with pytest.raises(MismatchError, match="scale of the exported model was replaced"):
        published.publish(3)


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


def test_a_sharded_trainer_writes_what_no_process_holds_whole(handle, trainer, model):
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
        exporter.publish(1)
        remote.alias(model)
        assert same_parameters(trainer, model)
        trainer.body.weight.data.add_(1)
        exporter.publish(2)
        assert remote.refresh() == 2
        assert same_parameters(trainer, model)
        trainer.body.weight.data.add_(1)
        assert torch.equal(exporter.copied()["body.weight"], trainer.body.weight)
    frozen, *versions = asked
    assert frozen == ["embed.weight"]
    assert versions == [sorted(name for name, p in trainer.named_parameters() if p.requires_grad)] * 3


def test_a_copy_has_what_would_be_published_and_changes_nothing(handle, trainer):
    trainer.embed.weight.requires_grad_(False)
    with WeightExporter.from_model(trainer, handle, dtype=torch.bfloat16) as exporter:
        exporter.publish(1)
        trainer.body.weight.data.add_(1)
        copies = exporter.copied()
        assert exporter.version == 1
        assert copies.keys() == {name for name, p in trainer.named_parameters() if p.requires_grad}
        assert torch.equal(copies["body.weight"], trainer.body.weight.to(torch.bfloat16))
        trainer.body.weight.data.add_(1)
        assert not torch.equal(copies["body.weight"], trainer.body.weight.to(torch.bfloat16))


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_blueprint_of_which_nothing_trains(handle, trainer):
    blueprint = Blueprint.of_model(trainer.requires_grad_(False))
    with pytest.raises(ValueError, match="No parameter of the blueprint trains"):
        WeightExporter.from_blueprint(blueprint, lambda _: None, handle, device=torch.device("cpu"))
