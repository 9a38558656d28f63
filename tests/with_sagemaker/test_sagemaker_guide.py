"""The guide's notebook is executed up to the launch, and shows what the committed one shows."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import run_notebook

GUIDE = Path(__file__).parents[2] / "examples" / "sagemaker" / "guide.ipynb"


def shown(cell: nbformat.NotebookNode) -> str:
    """What a cell printed, in however many pieces it came, and its value."""
    return "".join(output.get("text") or output["data"]["text/plain"] for output in cell.get("outputs", ()))


def test_the_guide_runs_up_to_the_launch_and_shows_what_the_committed_one_shows() -> None:
    committed, executed = nbformat.read(GUIDE, as_version=4), run_notebook.execute(GUIDE)
    assert len(executed.cells) == len(committed.cells)
    for was, now in zip(committed.cells, executed.cells):
        assert shown(now) == shown(was), f"write it again: scripts/run_notebook.py; cell: {now.source}"
