"""What verl's keys name: a model, and the rows of two tasks."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kit.runs import SETUP


def write_model_and_tasks(folder: Path) -> dict[str, str]:
    """Write `folder`/model, and a file of 160 rows for each of two tasks; return the files by task."""
    sys.path.insert(0, str(SETUP.parent))
    from random_model import get_trainer

    trainer = get_trainer()
    trainer.model.save_pretrained(folder / "model")
    trainer.processing_class.save_pretrained(folder / "model")
    files = {}
    for task, source in (("math", "math__sums"), ("logic", "simulation__sums")):
        rows = [
            {"data_source": source, "prompt": f"{number % 10}+{number % 7}=", "reward_model": {"ground_truth": "7"}}
            for number in range(160)
        ]
        files[task] = str(folder / f"{task}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), files[task])
    return files
