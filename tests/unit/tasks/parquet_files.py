"""Parquet files in the form of verl's recipes, with generated rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

RULE = {"style": "rule", "ground_truth": "4"}


def row(**changes: Any) -> dict[str, Any]:
    return {
        "data_source": "math__sums",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "ability": "math",
        "reward_model": RULE,
        "extra_info": {"split": "train", "index": 0},
        **changes,
    }


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    """A file with these rows; one row of the usual form without any."""
    pq.write_table(pa.Table.from_pylist(list(rows or (row(),))), path)
    return path
