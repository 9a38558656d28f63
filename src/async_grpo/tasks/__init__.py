"""Several tasks in one run: their rows and their rewards.

`load` reads the parquet files of verl's recipes (`files`, `data`), and `score` rewards each row by its `data_source`
(`scores`; `rules` and `judge` have what it pays). The formulas of turn rewards are in `async_grpo.credit`.
"""

from async_grpo.tasks.data import load
from async_grpo.tasks.scores import score

__all__ = ["load", "score"]
