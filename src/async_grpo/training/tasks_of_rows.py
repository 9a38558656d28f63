"""The tasks of a trainer's rows in words, by the columns `task` and `data_source` of its dataset."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from async_grpo.formatting import counted, size
from async_grpo.setup import fingerprints
from async_grpo.setup.algorithm import gradients_besides

if TYPE_CHECKING:
    from trl import GRPOTrainer

MOST_NAMED = 12  # of more tasks only the number is said


def describe_tasks(trainer: GRPOTrainer) -> str:
    """Say which tasks there are, and what of each a batch and the memory hold; empty without tasks.

    A trainer class that treats tasks says how in `tasks_in_words`.
    """
    parts = (_rows_of_each(trainer.train_dataset), getattr(trainer, "tasks_in_words", ""))
    held = gradients_besides(trainer)
    trained = (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
    nbytes = sum(fingerprints.count(parameter) * parameter.element_size() for parameter in trained)
    return "; ".join(filter(None, parts)) + (f", {held} × {size(nbytes)} more memory" if held else "")


def _rows_of_each(dataset: Any) -> str:
    columns = getattr(dataset, "column_names", None) or ()
    if "task" not in columns or not hasattr(dataset, "unique"):  # which a stream has not
        return ""
    tasks = dataset["task"][:]
    sources = dataset["data_source"][:] if "data_source" in columns else tasks
    named = [(task, str(source)) for task, source in zip(tasks, sources, strict=True) if isinstance(task, str) and task]
    rows, of_each = Counter(task for task, _ in named), Counter(task for task, _ in set(named))
    if len(rows) > MOST_NAMED:
        return f"{len(rows)} tasks in {len(named):,} rows"
    more = {task: f" ({counted(found, 'source')})" if found > 1 else "" for task, found in of_each.items()}
    return ", ".join(f"{task} {count:,} row{'' if count == 1 else 's'}{more[task]}" for task, count in rows.items())
