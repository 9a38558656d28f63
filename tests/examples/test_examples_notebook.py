"""The notebook runs, and what is committed of its outputs is small and of no particular machine."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from kit.scripts import module_at

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "examples" / "sagemaker" / "guide.ipynb"
NOTEBOOKS = [ROOT / "examples" / "notebook" / "train_and_plot.ipynb", GUIDE]
PATH_OF_A_MACHINE = re.compile(r"/(root|home|work|tmp|usr|mnt|data)/")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return module_at(ROOT / "scripts" / "run_notebook.py")


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """The kinds of outputs of each cell of code."""
    return [[output.output_type for output in cell.outputs] for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.integration
def test_it_runs_and_shows_what_the_committed_one_shows(script: ModuleType) -> None:
    committed = nbformat.read(script.NOTEBOOK, as_version=4)
    executed = script.execute()
    assert kinds(executed) == kinds(committed)
    images = [output for cell in executed.cells for output in cell.get("outputs", []) if "data" in output]
    assert any("image/png" in output.data for output in images)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_committed_outputs_are_small_and_of_no_machine(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 100_000
    without_images = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not PATH_OF_A_MACHINE.search(without_images)
    nbformat.validate(nbformat.read(path, as_version=4))


def test_the_guide_of_sagemaker_has_the_outputs_of_all_cells_before_the_launch(script: ModuleType) -> None:
    """It is executed by `make test-sagemaker`, where botocore is."""
    cells = [cell for cell in nbformat.read(GUIDE, as_version=4).cells if cell.cell_type == "code"]
    *before, launch = cells
    assert launch.metadata.tags == [script.LAUNCH] and launch.outputs == []
    assert all(cell.execution_count for cell in before) and all(cell.outputs for cell in before[1:])
