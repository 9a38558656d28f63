"""Copies through the host, with streams that do what they are told as late, and in as odd an order, as they may."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from staged_copies import staging
from torch import Tensor, nn

from async_grpo_ipc.copies import CopyPlan
from async_grpo_ipc.recording import RecordedCopies, record


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.integers(8, 64), st.integers(0, 2**16))
def test_every_order_that_the_marks_allow_copies_everything(sizes, nbytes, seed):
    sources = [torch.randn(size) for size in sizes]
    destinations = [torch.zeros(size) for size in sizes]
    CopyPlan(destinations, sources, movable=destinations, staging=staging(seed, nbytes)).run()
    assert all(torch.equal(into, out_of) for into, out_of in zip(destinations, sources, strict=True))


def test_a_buffer_that_is_filled_too_early_would_be_noticed(monkeypatch):
    """Without the wait before a buffer is used again, some order of the two GPUs mixes chunks."""
    torn = 0
    for seed in range(50):
        through = staging(seed, 16)
        monkeypatch.setattr(through.down, "wait", lambda mark: None)
        source, destination = torch.randn(64), torch.zeros(64)
        CopyPlan([destination], [source], movable=[destination], staging=through).run()
        torn += not torch.equal(source, destination)
    assert torn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_casts_and_odd_strides_arrive_too(dtype):
    sources = [torch.arange(12).reshape(3, 4).t(), torch.arange(5).to(dtype)]
    destinations = [torch.zeros(4, 3, dtype=torch.int64), torch.zeros(5)]
    CopyPlan(destinations, sources, movable=destinations, staging=staging(0, 16)).run()
    assert torch.equal(destinations[0], sources[0])
    assert destinations[1].tolist() == [0, 1, 2, 3, 4]


# --- Loading weights again as plain copies, with models that fuse, pad, cast, derive and change what they load ---

NAMES = ("embed", "q", "k", "v", "scale")


class Model(nn.Module):
    """q, k and v in one matrix; two rows more of the embedding than the checkpoint has; other types than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(6, 3, dtype=torch.float64))
        self.qkv = nn.Parameter(torch.zeros(8, 3))
        self.scale = nn.Parameter(torch.zeros(3))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.embed[:4].copy_(weights["embed"])
            self.embed[4:].fill_(0)
            for row, name in ((0, "q"), (4, "k"), (6, "v")):
                self.qkv.narrow(0, row, len(weights[name])).copy_(weights[name])
            self.load_scale(weights["scale"])

    def load_scale(self, scale: Tensor) -> None:
        self.scale.data.copy_(scale)


class Halves(Model):
    """Takes one tensor in two parts, one of them turned around."""

    def load_scale(self, scale: Tensor) -> None:
        self.scale.data[:1].copy_(scale[2:])
        self.scale.data[1:].copy_(scale[:2])


class AddsOne(Model):
    def load_scale(self, scale: Tensor) -> None:
        super().load_scale(scale)
        self.scale.data += 1


class TakesAPart(Model):
    def load_scale(self, scale: Tensor) -> None:
        self.scale.data[:2].copy_(scale[:2])


class Derives(Model):
    def __init__(self) -> None:
        super().__init__()
        self.derived = nn.Parameter(torch.zeros(3))

    def load_scale(self, scale: Tensor) -> None:
        super().load_scale(scale)
        self.derived.data.copy_(-scale.exp())


class TakesAnother(Model):
    """The parameter becomes what was loaded: nothing is copied."""

    def load_scale(self, scale: Tensor) -> None:
        self.scale = nn.Parameter(scale.clone())


def version(number: int) -> dict[str, Tensor]:
    """As they are published: parts of one block of memory."""
    block = torch.arange(100, dtype=torch.float32) + 1000 * number
    spans = {"embed": (0, 12), "q": (12, 12), "k": (24, 6), "v": (30, 6), "scale": (40, 3)}
    return {
        name: block[start : start + count].view(-1, 3) if count > 3 else block[start : start + count]
        for name, (start, count) in spans.items()
    }


def recorded(model: Model, weights: dict[str, Tensor]) -> RecordedCopies | None:
    return record(lambda: model.load(weights), model, weights)


@pytest.mark.parametrize("kind", [Model, Halves])
def test_later_versions_are_loaded_as_the_model_loads_them(kind: Callable[[], Model]) -> None:
    model, own = kind(), kind()
    plan = recorded(model, version(1))
    assert plan is not None
    for number in (2, 3):
        assert plan.fits(version(number))
        plan.repeat(version(number))
        own.load(version(number))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, own.get_parameter(name)), name


@pytest.mark.parametrize("kind", [AddsOne, TakesAPart, Derives, TakesAnother])
def test_a_model_that_does_more_than_to_copy_is_not_imitated(kind: Callable[[], Model]) -> None:
    model, own = kind(), kind()
    assert recorded(model, version(1)) is None
    own.load(version(1))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, own.get_parameter(name)), "but it is loaded"


def test_other_tensors_do_not_fit() -> None:
    plan = recorded(Model(), version(1))
    assert plan is not None
    assert not plan.fits({name: tensor for name, tensor in version(2).items() if name != "k"})
    assert not plan.fits({**version(2), "k": torch.zeros(3, 3)})
