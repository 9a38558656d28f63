"""Whether a resumed run has the model and the data that it was begun with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import nn

from async_grpo.setup import fingerprints

ROWS = [{"prompt": f"{number}", "answer": number} for number in range(2000)]


def data(rows: Any, seed: int = 42, shuffle: bool = True) -> str:
    dataset = Dataset.from_list(rows) if isinstance(rows, list) else rows
    trainer: Any = SimpleNamespace(
        train_dataset=dataset, args=SimpleNamespace(seed=seed), shuffle_dataset=shuffle, column_names=None
    )
    return fingerprints.of_data(trainer)


def test_the_same_data_are_the_same() -> None:
    assert data(ROWS) == data([dict(row) for row in ROWS])
    assert data(ROWS).startswith("2000 rows, seed 42 (")
    assert data(Dataset.from_list(ROWS).with_format("torch")) == data(ROWS)
    assert data([{"prompt": "only one"}]).startswith("1 row, ")


@pytest.mark.parametrize(
    "other",
    [
        data(ROWS[::-1]),
        data(ROWS[1:] + ROWS[:1]),
        data(ROWS[:-1]),
        data([{**row, "answer": row["answer"] + 1} for row in ROWS]),
        data(ROWS, seed=43),
        data(ROWS, shuffle=False),
    ],
)
def test_other_data_or_another_order_is_noticed(other: str) -> None:
    assert other != data(ROWS)


def test_streamed_data_are_not_looked_at() -> None:
    assert data(IterableDataset.from_generator(lambda: iter(ROWS))) == ""


def test_a_dataset_of_a_class_of_the_users_is_not_looked_at() -> None:
    class Numbers(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

    assert data(Numbers()) == ""


def test_images_are_not_decoded() -> None:
    rows = Dataset.from_list([{"prompt": "a", "image": "x"}, {"prompt": "b", "image": "y"}])
    assert data(rows) == data(Dataset.from_list([{"prompt": "a", "image": "y"}, {"prompt": "b", "image": "x"}]))


def test_models() -> None:
    model = fingerprints.of_model(nn.Linear(3, 2))
    assert model.startswith("2 tensors, 8 numbers, 8 of them trained (")
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    assert fingerprints.of_model(nn.Linear(3, 2)) == model
    assert len({model, *map(fingerprints.of_model, (nn.Linear(2, 3), nn.Linear(3, 2, bias=False), frozen))}) == 4
