"""Weights on their way to a node: what is published there is what was sent, bit by bit, or nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from async_grpo.nodes import receiving, sending
from async_grpo.nodes.cluster import StoreFullError
from async_grpo.nodes.receiving import ReceivedWeights
from async_grpo.nodes.sending import PublishedVersions
from async_grpo_ipc import WeightExporter, open_remote_memory
from async_grpo_ipc.layout import ALIGNMENT


class Tied(nn.Module):
    """Layers that train, one of which lies transposed, one that does not, and a second name for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.again = self.first
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.short = nn.Parameter(torch.randn(33).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)


class Here:
    """A server that publishes, and a node that receives, in one process."""

    def __init__(self, folder: Path) -> None:
        self.model = Tied()
        self.exporter = WeightExporter.from_model(self.model, folder / "server.json", slots=3)
        self.exporter.publish(0)
        self.versions = PublishedVersions(folder / "server.json", lambda data: data.copy())
        assert self.versions.newest() == 0
        self.node = ReceivedWeights(folder / "node.json", workers=1)
        self.handle = folder / "node.json"

    def train(self, version: int, at: int = 0) -> None:
        with torch.no_grad():
            self.model.first.weight[at % 16] += 1.0
        assert self.exporter.publish(version)

    def send(self, since: int | None = None) -> list[dict[str, Any]]:
        return [self.node.receive(piece.about, piece.data) for piece in self.versions.pieces(since)]

    def kinds(self) -> set[str]:
        return {piece.about["kind"] for piece in self.versions.pieces(self.node.published)}

    def close(self) -> None:
        self.node.close()
        self.versions.close()
        self.exporter.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    with closing(Here(tmp_path)) as both:
        yield both


def published(handle: Path) -> tuple[int, dict[str, torch.Tensor]]:
    with open_remote_memory(handle) as weights, weights.lease() as view:
        return view.version, {name: tensor.clone() for name, tensor in view.items()}


def assert_equal_there(here: Here, version: int) -> None:
    found, tensors = published(here.handle)
    assert found == version
    expected = dict(here.model.named_parameters(remove_duplicate=False))
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("bucket", [512 * 2**20, 100])
def test_a_node_publishes_what_the_server_has(here: Here, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "BUCKET_BYTES", bucket)
    here.send()
    assert_equal_there(here, 0)
    for version in range(1, 6):
        here.train(version, at=version)
        here.send(since=version - 1)
        assert_equal_there(here, version)


class _FullStore:
    """It keeps so many bytes at most, of what anybody still has."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: weakref.WeakSet[Any] = weakref.WeakSet()

    def put(self, data: Any) -> Any:
        gc.collect()
        if sum(kept.nbytes for kept in self._kept) + data.nbytes > self._room:
            raise StoreFullError("full")
        self._kept.add(copy := _Kept(data.shape, data.dtype))
        copy[:] = data
        return copy


class _Kept(np.ndarray):  # type: ignore[type-arg]
    __hash__ = object.__hash__  # type: ignore[assignment]


def test_where_the_store_is_full_buckets_are_smaller(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is kept there: a node that comes later gets its own."""
    monkeypatch.setattr(sending, "SMALLEST_BYTES", 64)
    here.versions._put = _FullStore(700).put
    answers = here.send()
    assert len(answers) > 4 and not any(answer["why"] for answer in answers)
    assert_equal_there(here, 0)
    here.train(1)
    here.send(since=0)
    assert_equal_there(here, 1)


def test_a_store_without_any_room_is_named(here: Here) -> None:
    here.versions._put = _FullStore(10).put
    with pytest.raises(StoreFullError):
        here.send()


def test_a_small_change_travels_as_a_difference_and_so_do_several(here: Here) -> None:
    here.send()
    here.train(1)
    assert here.kinds() == {"delta"}
    here.train(2, at=1)
    assert [piece.about["version"] for piece in here.versions.pieces(0)] == [1, 2]
    here.send(since=0)
    assert_equal_there(here, 2)


def test_what_is_put_again_is_all_new_in_the_store(here: Here) -> None:
    here.send()
    here.train(1)
    (before,) = here.versions.pieces(0)
    here.versions.put_again(before)
    (after,) = here.versions.pieces(0)
    assert (before.about["kind"], after.about["kind"]) == ("delta", "whole")
    here.versions.put_again(before)  # another node has missed it, too
    assert next(here.versions.pieces(0)).data is after.data
    here.versions.put_again(after)
    assert next(here.versions.pieces(0)).data is not after.data
    here.send(since=0)
    assert_equal_there(here, 1)


def test_all_is_sent_where_that_has_been_faster_than_a_difference(here: Here) -> None:
    here.send()
    here.train(1)
    here.send(since=0)
    here.versions.took(nbytes=10**9, seconds=1e-6)
    here.train(2)
    assert here.kinds() == {"whole"}
    here.send(since=1)
    assert_equal_there(here, 2)


def test_what_does_not_train_goes_once(here: Here) -> None:
    first, again = list(here.versions.pieces(None)), list(here.versions.pieces(-5))
    assert [piece.about["kind"] for piece in first] == ["static", "whole"]
    assert [piece.about["kind"] for piece in again] == ["whole"]
    assert here.model.frozen.nbytes <= first[0].nbytes < 2 * ALIGNMENT


def test_a_damaged_or_missing_piece_publishes_nothing_and_the_whole_heals(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.send()
    monkeypatch.setattr(sending, "BUCKET_BYTES", 100)
    here.train(1)
    damaged = [piece.data.copy() for piece in here.versions.pieces(-5)]
    damaged[0][3] ^= 1
    abouts = [piece.about for piece in here.versions.pieces(-5)]
    answers = [here.node.receive(about, data) for about, data in zip(abouts, damaged, strict=True)]
    assert "has the hash" in answers[-1]["why"] and answers[-1]["published"] == 0
    assert published(here.handle)[0] == 0
    assert "missing" in here.node.receive(abouts[2], damaged[2])["why"]
    assert "no version here" in here.node.receive({"kind": "delta", "version": 2}, damaged[2])["why"]
    here.send()
    assert_equal_there(here, 1)


def test_a_difference_that_was_damaged_asks_for_the_whole(here: Here) -> None:
    here.send()
    here.train(1)
    (piece,) = here.versions.pieces(0)
    broken = np.array(piece.data)
    broken[-1] ^= 1
    assert "damaged" in here.node.receive(piece.about, broken)["why"]
    assert published(here.handle)[0] == 0
    here.send()
    assert_equal_there(here, 1)


def test_a_version_waits_for_a_slot_that_nobody_reads(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "FREE_SLOT_S", 0.0)
    here.send()
    with ExitStack() as readers:
        for version in (1, 2, 3):
            weights = readers.enter_context(open_remote_memory(here.handle))
            readers.enter_context(weights.lease())
            here.train(version)
            answers = here.send(since=version - 1)
        assert answers == here.send(since=-5) == [{"published": 2, "why": "", "busy": True}]
    assert here.send(since=2) == [{"published": 3, "why": "", "busy": False}]
    assert_equal_there(here, 3)


def test_there_is_nothing_before_the_server_publishes_and_what_a_dead_one_left_is_not_taken(tmp_path: Path) -> None:
    versions = PublishedVersions(tmp_path / "server.json", lambda data: data)
    assert versions.newest() is None
    (tmp_path / "server.json").write_text("{}")
    assert versions.newest() is None
    (tmp_path / "server.json").unlink()
    with WeightExporter.from_model(Tied(), tmp_path / "server.json") as exporter:
        assert versions.newest() is None
        exporter.publish(4)
        assert versions.newest() == 4
    versions.close()
