"""Copies through the host, with streams that do what they are told as late, and in as odd an order, as they may."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from staged_copies import staging

from async_grpo_ipc.copies import CopyPlan


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
