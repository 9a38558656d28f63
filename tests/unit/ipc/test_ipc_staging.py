"""Copies through the host, with streams that do what they are told as late, and in as odd an order, as they may."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_grpo_ipc.copies import CopyPlan
from async_grpo_ipc.staging import Staging


class LateLane:
    """A stream of a GPU that works only while somebody waits for it, whenever `dice` says."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._told: list[Any] = []
        self._done = 0
        self.others: list[LateLane] = []

    def copy(self, into, out_of):
        self._told.append(lambda: into.copy_(out_of))

    def mark(self):
        return self, len(self._told)

    def wait(self, mark):
        self._told.append(mark)

    def begin(self):
        pass

    def finish(self):
        while self._done < len(self._told):
            able = [lane for lane in (self, *self.others) if lane.is_able()]
            assert able, "each lane waits for the other"
            self._dice.choice(able).do_next()

    def is_able(self):
        if self._done == len(self._told):
            return False
        following = self._told[self._done]
        return callable(following) or following[0]._done >= following[1]

    def do_next(self):
        following = self._told[self._done]
        if callable(following):
            following()
        self._done += 1


def staging(seed: int, nbytes: int) -> Staging:
    dice = random.Random(seed)
    down, up = LateLane(dice), LateLane(dice)
    down.others, up.others = [up], [down]
    return Staging((torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)), down, up)


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
