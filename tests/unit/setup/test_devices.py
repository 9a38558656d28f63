"""Devices by name, and how a process is held to one."""

from __future__ import annotations

import os

import pytest

from async_grpo.errors import UsageError
from async_grpo.setup.devices import hold_to_device, parse_device, threads_per_process


@pytest.mark.parametrize(("text", "gpus"), [("cpu", 0), ("cpu", 4), ("0", 1), ("3", 4), ("03", 4)])
def test_devices_that_exist(text: str, gpus: int) -> None:
    assert parse_device(text, gpus) == text.removeprefix("0" if text == "03" else "")


@pytest.mark.parametrize(
    ("text", "gpus", "why"),
    [
        *((text, 4, "must be a GPU index or 'cpu', got ") for text in ("", "gpu", "cuda:0", "-1", "1.0", "0,1", "²")),
        ("0", 0, r"GPU 0 was asked for, but no CUDA GPU is visible here\. Use --device cpu\."),
        ("4", 4, "There is no GPU 4: 4 visible, so the indices are 0 to 3"),
    ],
)
def test_devices_that_there_are_not(text: str, gpus: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_device(text, gpus)


@pytest.mark.parametrize(
    ("given", "device", "held"),
    [
        (None, "2", "2"),
        ("", "cpu", ""),
        ("0,1", "cpu", ""),
        ("4,5,6", "1", "5"),
        ("4, 5 ,6", "1", "5"),
        ("GPU-aaaa,GPU-bbbb", "1", "GPU-bbbb"),
    ],
)
def test_an_index_counts_within_what_is_already_visible(given: str | None, device: str, held: str) -> None:
    env = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    hold_to_device(device, env)
    assert env == {"CUDA_VISIBLE_DEVICES": held}


def test_cores_are_shared_fairly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [threads_per_process(count) for count in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
