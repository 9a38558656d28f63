"""Several tasks in one run: their rows, their rewards, and batches that have each of them.

`load` reads the parquet files of verl's recipes (`task_files`, `data`); `within` and `sampled` choose among the rows.
`score` rewards each row by its `data_source` (`scores`), and `MultiTask`, put before a trainer class, makes the batches
(`trainer`). The formulas of PPO and of turn rewards are in `async_grpo.credit`.
"""

from async_grpo.tasks.data import load, sampled, within
from async_grpo.tasks.scores import score
from async_grpo.tasks.trainer import MultiTask

__all__ = ["MultiTask", "load", "sampled", "score", "within"]
