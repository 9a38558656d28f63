"""Random configurations, asynchronous at staleness 0 and in plain TRL on the same completions: all that both log."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from random_configurations import padding_of, trainer_of

from async_grpo.setup import pieces
from kit.compared_with_trl import run_as_trl_would

pytestmark = pytest.mark.integration

QUICK = 3
DRAWN = int(os.environ.get("RANDOM_CONFIGURATIONS", "30"))
"""How many configurations the slow test draws; `make chaos` sets the variable, to 300 unless told otherwise."""


@pytest.fixture(autouse=True)
def every_piece_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CALLS", 0.0)


def compare(seed: int, folder: Path, model_folder: str) -> Any:
    run, _ = run_as_trl_would(trainer_of(seed, folder, model_folder), padding=padding_of(seed))
    return run.logs


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_random_configuration_trains_as_trl_does(seed: int, tmp_path: Path, model_folder: str) -> None:
    assert compare(seed, tmp_path, model_folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, DRAWN))
def test_more_random_configurations_train_as_trl_does(seed: int, tmp_path: Path, model_folder: str) -> None:
    assert compare(seed, tmp_path, model_folder)
