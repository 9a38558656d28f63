"""Chains of tests need not survive a power cut; a sync takes longer than all else here where the disk is busy."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
