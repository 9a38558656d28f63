"""The doctor on each machine of a trainer: who is there, the interface, and the rate of the link."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from async_grpo.checks.doctor.finding import Asked, Finding, Level
from async_grpo.checks.doctor.link import trainer_link
from async_grpo.training.machines import TrainerMachine


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def seen(address: str, *numbers: int, wait_s: float = 60.0) -> list[Finding]:
    """What each of these of two machines says."""

    def one(number: int) -> Finding:
        (found,) = trainer_link(Asked(Path("worker"), machine=TrainerMachine(number, 2, address), node_wait=wait_s))
        return found

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, numbers))


def test_both_machines_name_the_interface_and_the_rate_of_each(address: str) -> None:
    for number, found in enumerate(seen(address, 0, 1)):
        assert found.level is Level.OK and f"machine {number} of 2" in found.found, found
        assert "64 MB to all others by gloo on lo: " in found.found
        assert "GB/s from machine 0" in found.found and "GB/s from machine 1" in found.found


def test_an_interface_that_is_not_there_is_an_error_on_both(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    first, other = seen(address, 0, 1)
    assert first.level is other.level is Level.ERROR
    assert "gloo on nowhere0 failed: " in first.found and "GLOO_SOCKET_IFNAME" in first.fix


def test_a_machine_that_is_missing_is_named(address: str) -> None:
    (found,) = seen(address, 0, wait_s=0.5)
    assert found.level is Level.ERROR and "of --machine-rank 1 nothing was heard within 0.5 s" in found.found
