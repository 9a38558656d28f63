"""What the doctor says of programs that a model wrote: whether they are run, and whether they can be isolated."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.checks.doctor.finding import Level
from async_grpo.checks.doctor.machine import sandbox
from async_grpo.rewards.sandbox import SWITCH


def test_without_the_switch_nothing_is_asked_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = sandbox()
    assert (found.level, found.found) == (Level.OK, f"programs that a model wrote are not run: {SWITCH} is not 1")


def test_without_bubblewrap_the_switch_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = sandbox()
    assert found.level is Level.ERROR and "bubblewrap is not installed" in found.found
    assert found.fix == f"apt-get install bubblewrap, or unset {SWITCH}."


def test_where_programs_can_be_isolated_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr("async_grpo.checks.doctor.machine.run_code", lambda source: None)
    [found] = sandbox()
    assert found.level is Level.OK
