"""Execute the notebook of examples/notebook; with --write, keep its outputs in it.

python scripts/run_notebook.py --write
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook" / "train_and_plot.ipynb"
CELL_TIMEOUT_S = 300


def execute() -> nbformat.NotebookNode:
    """The notebook with fresh outputs, run by this interpreter. Raises `CellExecutionError` for a cell that fails."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    client.execute()
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute the notebook of examples/notebook.")
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    write = parser.parse_args().write
    notebook = execute()
    if write:
        nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
