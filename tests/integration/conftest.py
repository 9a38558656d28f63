"""Lets tests import the helper modules beside them; fixtures that several files share."""

import json
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "recipes")]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model on disk, from where TRL loads a reference model, too."""
    from in_process import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("model")
    build_model(build_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a deterministic run of 23 steps with one worker, which nothing disturbed."""
    from runs import IN_MID_BATCH, finish

    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder, "-n", "1", "--deterministic", "--steps", "23", TEST_GRPO=json.dumps(IN_MID_BATCH))
    return folder


@pytest.fixture(scope="session")
def undisturbed_lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of an adapter, 8 steps."""
    from runs import finish

    folder = tmp_path_factory.mktemp("undisturbed_lora")
    finish(folder, "-n", "1", "--deterministic", "--steps", "8", TEST_MODEL="lora")
    return folder
