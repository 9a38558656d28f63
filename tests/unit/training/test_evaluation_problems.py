"""Which rows an evaluation asks, and for which task each counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from datasets import Dataset

from async_grpo.training.prompts import evaluation_rows


def problems(given: Any) -> list[tuple[dict[str, Any], str]]:
    trainer: Any = SimpleNamespace(eval_dataset=given, _remove_unused_columns=lambda data, **_: data)
    return evaluation_rows(trainer)


def test_a_column_task_stays_what_it_is_for_the_reward_functions() -> None:
    rows = Dataset.from_dict({"prompt": ["1+1=", "x"], "task": ["sums", "letters"]})
    plain = Dataset.from_dict({"prompt": ["2"]})
    assert [task for _, task in problems(rows)] == ["sums", "letters"]
    assert problems({"old": rows, "new": plain}) == [
        ({"prompt": "1+1=", "task": "sums"}, "old"),
        ({"prompt": "x", "task": "letters"}, "old"),
        ({"prompt": "2"}, "new"),
    ]
