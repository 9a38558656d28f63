"""Lets every test beneath import the helper modules next to this file, and hypothesis take its time: cores are busy."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def setup_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_trainer.py"
    path.write_text("def get_trainer(): ...")
    return path
