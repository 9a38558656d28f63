"""A trainer of rows of three tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOTrainer

from async_grpo.tasks import MultiTask
from kit.compared_with_trl import settings
from kit.tiny_trainer import plain_rows

NAMES = ("math", "logic", "math", "code", "math", "math", "logic", "math", "code", "math", "math", "math", "math", "x")
TASKS = ("math", "logic", "code")


class MultiTaskTrainer(MultiTask, GRPOTrainer): ...


def rows_of_tasks() -> Dataset:
    """13 rows: 9 of math, 2 of logic, 2 of code; each of a source of its own half of its task."""
    given = [
        {**row, "task": task, "data_source": f"{task}__{at % 2}", "ground_truth": json.dumps(at)}
        for at, (row, task) in enumerate(zip(plain_rows(), NAMES, strict=True))
    ]
    return Dataset.from_list(given[:-1])


def multi_task_trainer(tmp_path: Path, given: dict[str, Any] | None = None, **changes: Any) -> Callable[..., Any]:
    settled = {"trainer_class": MultiTaskTrainer, "train_dataset": rows_of_tasks(), "per_device_train_batch_size": 6}
    return settings(tmp_path, given, **{**settled, "max_steps": 6, **changes})
