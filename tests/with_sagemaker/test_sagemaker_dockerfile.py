"""The image's recipe, as far as it can be checked where no builder is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "sagemaker"


def test_hadolint_finds_nothing() -> None:
    lint = Path(sys.executable).with_name("hadolint")
    found = subprocess.run([lint, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, ""), found.stderr
