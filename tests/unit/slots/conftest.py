"""Supervisors that look often, and a yard for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from slots_yard import Yard

from async_grpo.launch import supervisor


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 0.005)


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)
