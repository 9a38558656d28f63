"""Execute a notebook of the examples up to a cell that is tagged `launch`; with --write, keep its outputs in it.

python scripts/run_notebook.py --write
python scripts/run_notebook.py examples/sagemaker/guide.ipynb --write    # in the environment of make test-sagemaker
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook" / "train_and_plot.ipynb"
CELL_TIMEOUT_S = 300
LAUNCH = "launch"  # tags a cell that needs an account


def execute(path: Path = NOTEBOOK) -> nbformat.NotebookNode:
    """The notebook with fresh outputs, run by this interpreter. Raises `CellExecutionError` for a cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    cells = notebook.cells
    end = next((at for at, cell in enumerate(cells) if LAUNCH in cell.metadata.get("tags", ())), len(cells))
    notebook.cells = cells[:end]
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.cells += cells[end:]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(description="Execute a notebook of the examples.")
    parser.add_argument("notebook", type=Path, nargs="?", default=NOTEBOOK)
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    args = parser.parse_args()
    notebook = execute(args.notebook.resolve())
    if args.write:
        nbformat.write(notebook, args.notebook)


if __name__ == "__main__":
    main()
