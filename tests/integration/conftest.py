"""Lets tests import the helper modules beside them; fixtures that several files share."""

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
