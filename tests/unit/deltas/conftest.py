"""Chains of tests are short, and need not survive a power cut; a sync takes longest of all where the disk is busy."""

from __future__ import annotations

import os

import pytest

from async_grpo.deltas import writer
from kit.commands import printed, refused

__all__ = ["printed", "refused"]


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(autouse=True)
def each_fourth_version_is_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FULL_EVERY", 4)
