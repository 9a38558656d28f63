"""What the start of a run says of the tasks in its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from torch import nn

from async_grpo.training.before_start import MOST_NAMED, describe_tasks


def rows(*of_each: tuple[str, str, int]) -> Dataset:
    found = [{"task": task, "data_source": source} for task, source, count in of_each for _ in range(count)]
    return Dataset.from_list(found)


MATH_AND_CODE = rows(("math", "math__a", 1200), ("code", "code__a", 2), ("math", "math__b", 3))
OF_EACH = "math 1,203 rows (2 sources), code 2 rows"


@pytest.mark.parametrize(
    ("dataset", "declared", "says"),
    [
        (MATH_AND_CODE, {}, OF_EACH),
        (MATH_AND_CODE.remove_columns("data_source"), {}, "math 1,203 rows, code 2 rows"),
        (
            MATH_AND_CODE,
            {"tasks_in_words": "a batch of 4 groups has 2 + 2; gradients: pcgrad", "gradients_besides": 2},
            f"{OF_EACH}; a batch of 4 groups has 2 + 2; gradients: pcgrad, 2 × 4.0 kB more memory",
        ),
        (rows(*((str(task), "", 1) for task in range(MOST_NAMED + 1))), {}, f"{MOST_NAMED + 1} tasks in 13 rows"),
        (MATH_AND_CODE.to_iterable_dataset(), {}, ""),
        (Dataset.from_list([{"prompt": "x"}]), {}, ""),
        (Dataset.from_list([{"task": {"id": 1}}]), {}, ""),
    ],
)
def test_the_line_of_the_tasks(dataset: Any, declared: dict[str, Any], says: str) -> None:
    model = nn.ModuleList([nn.Linear(1000, 1, bias=False), nn.Linear(9, 1).requires_grad_(False)])
    assert describe_tasks(SimpleNamespace(train_dataset=dataset, model=model, **declared)) == says  # type: ignore[arg-type]
