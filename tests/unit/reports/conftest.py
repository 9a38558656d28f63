"""A run of three steps for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.archived_run import ArchivedRun, three_steps


@pytest.fixture
def run(tmp_path: Path) -> ArchivedRun:
    return three_steps(tmp_path)
