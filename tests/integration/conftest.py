"""Fixtures that several files share."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model on disk, from where TRL also loads a reference model."""
    from kit.tiny_trainer import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    build_model(build_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    from kit.tiny_trainer import build_trainer

    return build_trainer(tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a deterministic run of 14 steps with one worker, which nothing disturbed."""
    from kit.runs import IN_MID_BATCH

    return once("undisturbed", tmp_path_factory, "--steps", "14", TEST_GRPO=json.dumps(IN_MID_BATCH))


@pytest.fixture(scope="session")
def undisturbed_lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of an adapter, 8 steps."""
    return once("undisturbed_lora", tmp_path_factory, "--steps", "8", TEST_MODEL="lora")


def once(name: str, tmp_path_factory: pytest.TempPathFactory, *options: str, **env: str) -> Path:
    """Train in a folder that all processes of this pytest share, unless another of them has."""
    from kit.runs import DEADLINE_S, finish

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / name
    with FileLock(shared / f"{name}.lock", timeout=2 * DEADLINE_S):
        if not (folder / "trained").exists():
            folder.mkdir()
            finish(folder, "-n", "1", "--deterministic", *options, **env)
            (folder / "trained").touch()
    return folder
